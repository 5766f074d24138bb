"""Tensors with a meaning of their own: ragged rows, hot units, scaled weights."""
