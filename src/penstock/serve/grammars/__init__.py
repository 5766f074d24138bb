"""Grammars of requests: whether they can be compiled, asked aside, and the vocabulary that they are over."""
