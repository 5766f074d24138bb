"""Ops that attend: over pages, chunks, chosen units, latent rows; and the merge of parts."""
