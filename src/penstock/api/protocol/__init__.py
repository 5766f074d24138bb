"""Fields of request bodies, as typed structs."""
