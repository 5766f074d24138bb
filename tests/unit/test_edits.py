"""Edits of tensors: made when they are applied, in one copy and one scatter for each tensor."""
from __future__ import annotations

import torch

from penstock.exec.step import edits
from penstock.exec.step.edits import Edits


def tables() -> list[torch.Tensor]:
    return [torch.zeros(2, 3, dtype=torch.int32), torch.zeros(3, dtype=torch.int64),
            torch.zeros(2, 2, dtype=torch.float64), torch.full((5,), 9, dtype=torch.int32)]


def test_of_what_is_put_twice_the_second_counts_and_nothing_comes_early(monkeypatch):
    """On a CPU, and packed as for a device, where nothing but the pinning is another."""
    together, packed = edits._together, []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)

    def through(parts):
        packed.append(len(parts))
        return together(parts, torch.device("cpu"))
    for device in ("cpu", "cuda"):
        [ints, longs, floats, untouched], made = tables(), Edits(device)
        if device == "cuda":
            monkeypatch.setattr(edits, "_together", lambda parts, device: through(parts))
        made.put(ints, ((i, -1) for i in range(3)))
        made.put(longs, [(2, -(1 << 63))])
        made.put(ints, zip([2, 4], [7, 8], strict=True))
        made.put(floats, enumerate((.25, 1e300), 1))
        made.put(untouched, [])
        assert not (ints.any() or longs.any() or floats.any())
        made.apply()
        assert ints.tolist() == [[-1, -1, 7], [0, 8, 0]]
        assert longs.tolist() == [0, 0, -(1 << 63)] and floats.tolist() == [[0, .25], [1e300, 0]]
        assert untouched.tolist() == [9] * 5
        longs[2] = 5
        made.apply()                                    # nothing is made twice
        assert longs.tolist() == [0, 0, 5]
    assert packed == [6]
