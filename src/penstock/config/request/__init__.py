"""What a request may ask: sampling parameters, what its attention selects."""
