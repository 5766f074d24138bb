"""Traces of requests: the phases that an engine has seen, and the spans that are made of them."""
