"""Ops that choose what is read, and find where it lies."""
