"""The Python library: LLM, AsyncLLM and what they return."""
