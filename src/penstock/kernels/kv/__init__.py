"""Ops that write KV and fetch it from the host."""
