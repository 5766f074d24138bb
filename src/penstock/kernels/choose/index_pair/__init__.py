"""index_pair: what a lightning indexer compares, in fp8. Contract and implementations.

    T tokens   I index heads   J index head dim   W bytes of a key that is kept
"""
from __future__ import annotations

from typing import Protocol

from torch import Tensor

from penstock.kernels.choose.index_pair import reference
from penstock.kernels.op import DEVICES, Implementation, Op
from penstock.kernels.triton.lazy import lazy

__all__ = ["OP", "IndexPair"]


class IndexPair(Protocol):
    def __call__(self, q_TIJ: Tensor, weight_TI: Tensor,
                 key_TJ: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys through a Hadamard matrix, rounded to their dtype, then both coded. Capturable.

        q_TIJ      f32|bf16, dense; J a power of two from 16 to 128
        weight_TI  f32, dense in I
        key_TJ     dtype of q, dense in J
        Returns    q_TIJ e4m3, weight_TI times the power of two that scales each of them
                   (`types.fp8.by_power`), and kept_TW uint8 of `types.fp8`, all of a key coded
        """


OP: Op[IndexPair] = Op("index_pair", (
    lazy("triton", "penstock.kernels.choose.index_pair.triton_pair:index_pair"),
    Implementation("reference", reference.index_pair, "torch's own operations", DEVICES),
))
