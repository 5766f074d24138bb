"""A spill that keeps pages fills a hot buffer: what the next step reads of them stays, the oldest go."""
from __future__ import annotations

import pytest
import torch

from penstock.kernels import registry
from penstock.kernels.platform import probe
from penstock.memory.hot import HotBuffers


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("backend", registry.OPS["resolve"].names)
def test_kept_pages_are_older_than_the_step_that_reads_them(backend: str, steps: int) -> None:
    implementation = registry.OPS["resolve"].get(backend)
    if "cpu" not in implementation.devices:
        pytest.skip("on a CPU")
    implementation.usable_on(probe())
    hot = HotBuffers(layers=1, rows=2, kv_heads=1, pages=4, hot_pages=2, page_units=2)
    [layer] = hot.layers
    table = torch.tensor([[-1] * 4, [10, 11, 12, 13]], dtype=torch.int32)
    for _ in range(steps):
        hot.tick(1)
    hot.bind(1, [5, 6], [2, 3])                         # units 4 to 7 of row 1 are in slots 0 to 3
    now_1 = hot.tick(1)[0][0]
    assert layer.unit_RKS[1, 0].tolist() == [4, 5, 6, 7] and (layer.stamp_RKS[1, 0] < now_1).all()
    chosen_BKC = torch.tensor([[[4, 0, 1]]], dtype=torch.int32)
    slot_BKC, miss_E3, num_1 = implementation.run(
        chosen_BKC, torch.tensor([1], dtype=torch.int32), torch.full_like(table, -1), table, layer, now_1,
        page_units=2)
    assert layer.unit_RKS[1, 0].tolist() == [4, 0, 1, 7]        # 4 is read: 5 and 6 go
    assert slot_BKC.tolist() == [[[10, 11, 12]]] and int(num_1) == 2
    assert sorted(miss_E3[:2].tolist()) == [[0, 20, 11], [0, 21, 12]]
