"""Python's cycle collector in a process that keeps what it has: the model, the modules, who asks."""
from __future__ import annotations

import gc

# Young objects as always. Larger young generations make fewer and longer pauses, 10 to 20 ms.
YOUNG, MIDDLE = 700, 10


def spare(full: int) -> None:
    """Do not walk what there is now, which lives as long as the process; full: middle collections to each
    of all."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, full)
