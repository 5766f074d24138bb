"""From logits to tokens: filters, the uniform numbers of a request, on the host or on the device."""
