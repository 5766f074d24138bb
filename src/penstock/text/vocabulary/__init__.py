"""What tokenizers are made of beside tokenizer.json: added tokens, patterns that split text, ranks."""
