"""Block-scaled fp8 weights, as DeepSeek-V3 and others ship them: e4m3 elements, one scale a block.

Owns the shapes; `weights.formats.blocks` reads them. They become float32 when they are loaded, or, for a device
that has kernels for them, `kernels.types.scaled.Scaled`.
"""
from __future__ import annotations

from dataclasses import dataclass

MXFP4 = "mxfp4"                     # the other method that is read, see `weights.mxfp4`


@dataclass(frozen=True, slots=True)
class Blocks:
    """`rows` x `cols` elements share one scale; blocks at the right and lower edge are smaller."""

    rows: int
    cols: int

    def scales(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Shape of the scales of a weight of this shape."""
        return -(-shape[0] // self.rows), -(-shape[1] // self.cols)


def quantises(name: str) -> bool:
    """Whether the weight of this name is in fp8 in checkpoints that are: the projections of a layer, not its
    router, nor the weights of an indexer's heads."""
    return name.endswith("_proj.weight") and not name.endswith(".weights_proj.weight")
