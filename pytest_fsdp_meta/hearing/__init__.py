"""What ranks say while they run, as pytest has it: output, warnings, a line of progress, the debugger."""
