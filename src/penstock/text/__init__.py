"""Text of models: chat templates, tokenizers, detokenizer, tool calls, grammars."""
