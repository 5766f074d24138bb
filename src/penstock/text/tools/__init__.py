"""Tool calls and reasoning in a model's text: formats, parsers, grammars."""
