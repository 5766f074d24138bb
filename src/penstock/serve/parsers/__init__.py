"""What an answer's text says: reasoning, text and calls of tools, one file a format."""
