"""The command line: one module a command, and the table of all of them."""
