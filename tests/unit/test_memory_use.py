"""What a GPU's memory is taken for: every byte in one part, whatever was freed meanwhile."""
from __future__ import annotations

import pytest
import torch

from penstock.exec.start.memory_use import MemoryUse

MIB = 1 << 20


@pytest.fixture
def gpu(monkeypatch) -> dict[str, int]:
    """A GPU of 1,000 MiB: bytes that torch holds, those of them that are free, and those of others."""
    now = {"held": 0, "idle": 0, "others": 100 * MIB}

    def empty() -> None:
        now["held"], now["idle"] = now["held"] - now["idle"], 0

    monkeypatch.setattr(torch.cuda, "empty_cache", empty)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: now["held"])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (
        1000 * MIB - now["others"] - now["held"], 1000 * MIB))
    return now


def test_parts_of_a_gpus_memory_are_all_that_is_in_use(gpu) -> None:
    use = MemoryUse(cuda=True)
    for part, taken, idle, outside in (("weights", 300, 50, 0), ("kernels", 40, 30, 0), ("kv", 200, 0, 80),
                                       ("graphs", 60, 10, 0), ("graphs", 5, 0, 0)):
        gpu["held"] += taken * MIB
        gpu["idle"] += idle * MIB
        gpu["others"] += outside * MIB
        use.took(part, outside * MIB)
    line = use.ended(workspace=7 * MIB)
    assert {part: n // MIB for part, n in use.parts.items()} == {
        "weights": 250, "kernels": 10, "kv": 280, "graphs": 55, "other": 100}
    assert sum(use.parts.values()) == (gpu["held"] + gpu["others"]) == 695 * MIB
    assert line.startswith("GPU memory in use: 695.0 MiB, of which 250.0 MiB weights, 10.0 MiB kernels'")
    assert line.endswith("; the largest step takes up to 7.0 MiB more")
    assert use.info()["gpu_kv_bytes"] == 280 * MIB


def test_a_cpu_has_no_parts() -> None:
    use = MemoryUse(cuda=False)
    use.took("weights")
    assert use.ended() == "" and use.parts == use.info() == {}
