"""Weights as files: safetensors and GGUF, their names, types and places."""
