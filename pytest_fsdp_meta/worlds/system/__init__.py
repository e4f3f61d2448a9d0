"""What worlds need from the operating system: messages, output, processes, temporary folders and the terminal."""
