"""Tokenizers, chat templates and their helper processes, text out of tokens."""
