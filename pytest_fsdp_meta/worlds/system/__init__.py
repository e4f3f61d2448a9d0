"""What worlds need from the operating system: messages, output, processes and temporary folders."""
