"""What lies between the products of a layer."""
