"""Where the files of a model come from, and which fields of its config a user replaces."""
