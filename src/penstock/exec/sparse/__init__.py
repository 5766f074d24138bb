"""Decode that reads a part: choosing by bounds or by the model's indexer, and hot rows."""
