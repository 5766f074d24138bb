"""Ops that attend: over pages, chunks, chosen units, MLA KV entries."""
