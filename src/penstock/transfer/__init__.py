"""KV from one engine of a pair into the pages of the other: codec, authenticated stream, layouts.

The protocol, which decides what is granted, pushed and ended, is `core.pair`; this carries it.
"""
