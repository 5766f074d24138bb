"""From weights of tokens to one of them: filters, uniform numbers, and the draw."""
