"""The HTTP API: the server, its routes, limits and formats."""
