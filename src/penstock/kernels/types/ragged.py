"""The one ragged layout of a step: prefill chunks, decodes and any mix; decode is one query.

    B rows of the step   T tokens of the step   R rows of the tables   M pages a row   G page size
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Ragged:
    """Where the step's tokens come from and which slots of a cache group they may read. Built once,
    used per layer; its size does not depend on contexts.

    query_start   host, B+1 ints: tokens [query_start[i], query_start[i+1]) belong to row i
    context       host, B ints: KV tokens visible to the row's last query, itself included; query j
                  of a row with c queries sees positions 0 .. context - c + j
    rows          host, B ints: which row of the tables each is
    pages_RM      int32, device: entry [r, i] is the index into the device pool (its id less the
                  pool's base) of page i of row r; -1: none. A view of the live table
    page_T        int64, device: index into the pool of the page that each new token is written to
    offset_T      int64, device: where in that page
    page_size     G, tokens
    """

    query_start: tuple[int, ...]
    context: tuple[int, ...]
    rows: tuple[int, ...]
    pages_RM: Tensor
    page_T: Tensor
    offset_T: Tensor
    page_size: int


def on_device(values: Sequence[int] | Sequence[float] | npt.NDArray[np.int64], device: torch.device,
              dtype: torch.dtype) -> Tensor:
    """A copy on `device` that the host does not wait for: torch keeps the pinned source until then."""
    host = torch.tensor(values, dtype=dtype)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
