"""From logits to tokens: penalties, filters, the draw, on the host or on the device."""
