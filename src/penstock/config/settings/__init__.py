"""The tree of settings, its command line, what is refused and what is not built."""
