"""Which implementation of each op runs here: chosen once, by name, with the reasons kept to print.

Owns the list of ops and the choice. Refuses to fall back silently when a name was requested.
"""
from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.kernels.attention import (
    chunk_attention,
    latent_attention,
    merge,
    paged_attention,
    sparse_attention,
)
from penstock.kernels.choose import block_select, index_pair, index_select, resolve
from penstock.kernels.choose import select as unit_select
from penstock.kernels.fused import layer
from penstock.kernels.gemm import experts, linear
from penstock.kernels.kv import gather, write_kv
from penstock.kernels.op import Op, Unusable
from penstock.kernels.platform import KernelError, Platform
from penstock.kernels.sample import draw, mask
from penstock.kernels.state import scan

OPS: dict[str, Op[Any]] = {op.name: op for op in (
    linear.OP, paged_attention.OP, layer.OP, write_kv.OP, unit_select.OP, resolve.OP, gather.OP,
    sparse_attention.OP, chunk_attention.OP, merge.OP, index_pair.OP, index_select.OP, block_select.OP,
    latent_attention.OP, experts.OP, draw.OP, mask.OP, scan.OP)}
# Beside what every model needs, by score of what selects: indexer keys, one choice for all heads of MLA KV entries or
# one for each KV head, and bounds of keys.
SELECTING = {"relu": ("write_kv", "resolve", "gather", "index_pair", "index_select"),
             "max": ("write_kv", "resolve", "gather", "index_pair", "block_select", "sparse_attention"),
             "bounds": ("write_kv", "select", "resolve", "gather", "sparse_attention", "chunk_attention", "merge")}


@dataclass(frozen=True, slots=True)
class Choice:
    """What runs `op`, why, and what did not: (name, why not) of everything faster or unusable."""

    op: str
    name: str
    reason: str
    skipped: tuple[tuple[str, str], ...] = ()
    usable: tuple[str, ...] = ()        # others that would run here, if named

    def __str__(self) -> str:
        """`linear: onednn (avx512_bf16); reference usable`."""
        parts = [f"{self.op}: {self.name} ({self.reason})"]
        parts += [f"{name} skipped: {why}" for name, why in self.skipped]
        parts += [f"{name} usable" for name in self.usable]
        return "; ".join(parts)


def choose(platform: Platform, requested: Mapping[str, str] | None = None,
           ops: Sequence[str] | None = None) -> dict[str, Choice]:
    """One choice for each of `ops`: the requested name, else the first implementation that is usable.

    requested   op name -> implementation name; ops not named are chosen here
    ops         those that will be called, None for all: what will not is neither probed nor built
    Raises KernelError for an op or a name that does not exist, or a named one that cannot run.
    """
    requested = {_OLD_OPS[op]: name for op, name in (requested or {}).items() if op in _OLD_OPS} | {
        op: name for op, name in (requested or {}).items() if op not in _OLD_OPS}
    ops = tuple(OPS) if ops is None else ops
    for op in requested:
        if op not in ops:
            raise KernelError(f"there is no op {op!r} to choose an implementation for: "
                              f"use one of {', '.join(ops)}")
    return {name: _chosen(OPS[name], platform, requested.get(name)) for name in ops}


# Spellings of one release: C was `native`, a linear was `fastest` of several, and `cuda` was an op's way on a GPU,
# whatever it is made of.
_OLD = ("native", "fastest", "cuda")
_OLD_OPS = {"scaled_linear": "linear"}          # ops of one release, and what they are part of now


def _renamed(op: Op[Any], name: str, usable: Collection[str]) -> str:
    """Return the present name of an implementation. Raises KernelError: the op has none."""
    if name not in op.names and (name == "native" or (name, op.name) == ("fastest", "linear")):
        name = "c"
    elif name not in op.names and name == "cuda":
        own = [i.name for i in op.implementations if i.devices == ("cuda",)]
        name = next((one for one in own if one in usable), next(iter(own), name))
    return op.get(name).name


def _chosen(op: Op[Any], platform: Platform, wanted: str | None) -> Choice:
    reasons: dict[str, str] = {}
    skipped: dict[str, str] = {}
    if wanted is not None and wanted not in (*op.names, *_OLD):
        op.get(wanted)
    for implementation in op.implementations:
        try:
            reasons[implementation.name] = implementation.usable_on(platform)
        except Unusable as why:
            skipped[implementation.name] = str(why)
    wanted = wanted and _renamed(op, wanted, reasons)
    if wanted in skipped:
        raise KernelError(f"{op.name}={wanted} cannot run here: {skipped[wanted]}; "
                          f"use one of {', '.join(reasons)}")
    if not reasons:
        raise KernelError(f"{op.name} has nothing that runs on {platform.device}: "
                          + "; ".join(f"{name} {why}" for name, why in skipped.items())
                          + ("; take --device cpu" if platform.device != "cpu" else ""))
    name = wanted or next(iter(reasons))
    reason = reasons[name] + (", requested" if wanted else "")
    return Choice(op.name, name, reason, tuple(skipped.items()),
                  tuple(other for other in reasons if other != name))
