"""The server: HTTP, the OpenAI surface, limits and keys, a pair on one machine."""
