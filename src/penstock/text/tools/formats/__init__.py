"""One file a format of calls: how a model writes them, and how they are read."""
