"""Ops of layers that keep a state in place of the KV of their tokens."""
