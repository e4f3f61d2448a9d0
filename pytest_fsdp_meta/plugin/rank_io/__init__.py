"""How pytest shows what ranks do: their output, warnings and progress, and a debugger on them."""
