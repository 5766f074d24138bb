"""Quantised checkpoints: one reader per format, chosen by `quant_method` from a table."""
