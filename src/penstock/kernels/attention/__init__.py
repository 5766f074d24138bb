"""Ops that attend: over pages, chunks, chosen units, latent rows."""
