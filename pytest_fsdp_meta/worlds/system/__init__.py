"""Processes, folders, terminals, output files and messages: what worlds need from the operating system."""
