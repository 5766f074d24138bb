"""One step as tensors: its tables, who attends in a layer, what passes between stages."""
