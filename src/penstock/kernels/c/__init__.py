"""How C kernels are built, and what they share."""
