"""On which device tests of executors and servers run: `pytest --device cuda` says so, else the CPU."""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from penstock.exec.worker import Worker
from penstock.kernels.attention import paged_attention
from penstock.kernels.fused import layer
from penstock.kernels.gemm import experts, linear
from penstock.kernels.platform import probe
from penstock.kernels.registry import choose
from penstock.kernels.state import scan
from penstock.model import registry

DEVICE = "cpu"


def model(config: dict[str, Any], dtype: Any, seed: int, scale: float, stage: Any = None) -> Any:
    """Random weights, the same on every device, norms as they come and the rest times `scale`; sinks so heavy
    that they are felt."""
    pack: Callable[..., Any] = lambda w, b: functools.partial(F.linear, weight=w, bias=b)  # noqa: E731
    ops, together = layer.OP.use("reference"), None
    if DEVICE == "cuda":
        pack, ops = functools.partial(linear.pack, backend="triton"), layer.OP.use("triton")
        together = experts.OP.use("triton")
    made = registry.build(config, dtype=dtype, linear=pack, ops=ops, stage=stage, experts=together,
                          scan=scan.OP.use(choose(probe(DEVICE), ops=("scan",))["scan"].name))
    for name, tensor in registry.dummy_tensors(config, seed, made.wants, drafts=made.stage.drafts):
        weight = tensor if "norm" in name or name.endswith(registry.FACTORS) else tensor * scale
        made.load(name, (weight + 3 if name.endswith(".sinks") else weight).to(DEVICE))
    made.finish()
    return made


def captured(rank: Worker, drafts: int) -> Worker:
    """The rank, with decode steps, with so many drafts a row, captured where that is possible."""
    if DEVICE == "cuda":
        rank.capture((1, 2, 4), width=1 + drafts)
    return rank


def flags() -> tuple[str, ...]:
    """Of a server."""
    return () if DEVICE == "cpu" else ("--device", DEVICE, "--dtype", "float32")


def backends() -> list[str]:
    """Attention for this device, the default first."""
    if DEVICE == "cpu":                     # not probed, which compiles
        return [i.name for i in paged_attention.OP.implementations if DEVICE in i.devices]
    here = choose(probe(DEVICE), ops=("paged_attention",))["paged_attention"]
    return [name for name in paged_attention.OP.names if name in (here.name, *here.usable)]


def sequence(tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and positions of one whole sequence."""
    return torch.tensor(tokens, device=DEVICE), torch.arange(len(tokens), device=DEVICE)
