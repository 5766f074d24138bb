"""APIs of other servers: Anthropic's, OpenAI's Responses, SGLang's, and the blocks of the KV cache."""
