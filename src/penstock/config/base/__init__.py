"""Ground that every layer may stand on: errors, sizes, paths, the machine."""
