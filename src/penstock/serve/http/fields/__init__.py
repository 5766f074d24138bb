"""Fields of requests that several routes share, as typed data."""
