"""write_kv: a step's new rows into every copy of their pages. Contract and implementations.

    T tokens of the step   P pages   K KV heads   C planes   G page size   H head dim
    S units a page of summaries
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from penstock.kernels.kv.write_kv import native, reference
from penstock.kernels.kv.write_kv.spec import WriteAt
from penstock.kernels.op import DEVICES, Implementation, Op
from penstock.kernels.triton.lazy import lazy
from penstock.kernels.types.hot import HotLayer

__all__ = ["OP", "WriteAt", "WriteKV"]


class WriteKV(Protocol):
    def __call__(self, values: Sequence[Tensor], at: WriteAt, device_PKCGH: Tensor,
                 host_PKCGH: Tensor | None = None, hot: HotLayer | None = None,
                 bounds_PK2SH: Tensor | None = None) -> None:
        """Write each token's rows to its device slot, its host slot and the hot unit that holds its
        position, and the bounds of each unit that one of them completes.

        values         a tensor x_TKH a plane: k and v, or one MLA KV entry; dtype of the pools, dense
                       in H, any stride in T and K
        device, host   one layer's pages of both tiers, dense in G and H. No host: `host_T` is -1
        hot            one layer's hot buffers, whose slots are pages of the device pool; a unit that
                       is not in one is not brought there
        bounds         elementwise minimum and maximum over the unit's keys (plane 0), of codes
                       (`types.fp8.encode_heads`) over what these stand for, as `types.fp8.outward`
                       has them in the pool's dtype: bf16, uint8 or the keys' own, f32 of codes; always computed
                       from all of them, read from the device page if the token has one, else from the
                       host page: what was there before never enters. A unit that is not full yet is
                       left as it is: it is never read
        order          tokens of a unit follow one another, in order of positions
        Writes         nothing else. No destination has duplicates.
        """


OP: Op[WriteKV] = Op("write_kv", (
    lazy("triton", "penstock.kernels.kv.write_kv.triton_places:write_kv"),
    Implementation("c", native.write_kv, native.probe),
    Implementation("reference", reference.write_kv, "one token at a time", DEVICES),
))
