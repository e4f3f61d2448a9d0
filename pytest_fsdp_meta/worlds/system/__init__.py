"""What worlds need from the operating system: output, processes and temporary folders."""
