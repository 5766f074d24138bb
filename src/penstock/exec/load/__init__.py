"""What an engine holds: weights and back-ends, the layout of its caches, their sizes."""
