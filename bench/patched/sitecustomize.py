"""Changes what engines and ranks compute, in every one that starts with this folder on PYTHONPATH.

FAULT    a seeded bug of the simulator, such as hot-buffer-skipped-on-resume; the list is in tests/sim/mutants
CHOICE   how `select` scores units instead of by bounds, in its reference: `--backends select=reference`.
         quest: the most that q.k can be by a unit's bounds. mean: q.(mean of its keys), with `write_kv=reference` too.
         window: the last units, so that sinks and a window are what a budget reads
"""
from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

ENGINE, RANK = "penstock.engine.process", "penstock.exec.pipeline.process"


def fault(name: str) -> None:
    """Before the engine's modules import Core."""
    sys.path.append(str(Path(__file__).parents[2] / "tests" / "sim"))
    from mutants import MUTANTS

    import penstock.core.core as core
    core.Core = MUTANTS[name]           # type: ignore[misc, assignment]


def choice(name: str) -> None:
    import torch

    from penstock.kernels.choose.select import reference
    from penstock.kernels.kv import write_kv

    def last(q_gH: torch.Tensor, bounds_U2H: torch.Tensor) -> torch.Tensor:
        return torch.arange(len(bounds_U2H), dtype=torch.float32)

    def with_means(values: Any, at: Any, device: torch.Tensor, host: torch.Tensor | None = None, hot: Any = None,
                   bounds: torch.Tensor | None = None) -> None:
        real(values, at, device, host, hot, bounds)
        size, unit = device.shape[3], at.unit
        for on_device, on_host, summary, position in zip(*(x.tolist() for x in (
                at.device_T, at.host_T, at.bounds_T, at.position_T)), strict=True):
            if bounds is None or summary < 0 or (position + 1) % unit:
                continue
            slot, pool = (on_device, device) if on_device >= 0 else (on_host, host)
            assert pool is not None
            first, of_page = slot % size - unit + 1, bounds.shape[3]
            mean_KH = pool[slot // size, :, 0, first:first + unit].float().mean(1)
            bounds[summary // of_page, :, :, summary % of_page] = mean_KH[:, None].to(bounds.dtype)

    if name == "quest":
        reference.MOST, reference.LEAST = 1.0, 0.0
    elif name == "window":
        reference.scores = last
    elif name == "mean":
        written = write_kv.OP.get("reference")
        real = written.run
        object.__setattr__(written, "code", with_means)
    else:
        raise ValueError(f"CHOICE is {name}")


if {ENGINE, RANK} & {*sys.orig_argv}:
    if (given := os.environ.get("FAULT")) and ENGINE in sys.orig_argv:
        fault(given)
    if given := os.environ.get("CHOICE"):
        choice(given)
