"""What talks to an engine: the client, generation, the library's `LLM`."""
