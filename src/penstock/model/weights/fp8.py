"""Block-scaled fp8 weights, as DeepSeek-V3 and others ship them: e4m3 elements, one scale a block.

Owns the config's words for it and the shapes. `model.checkpoint` makes float32 of such weights while it reads
them, or, for a device that has kernels for them, `kernels.scaled.Scaled`.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.config.base.errors import ConfigError, show

MXFP4 = "mxfp4"                     # the other method that is read, see `weights.mxfp4`
SCALE_SUFFIX = "_scale_inv"         # of the tensor beside `weight` that its elements are multiplied by


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


def read_blocks(config: dict[str, Any], where: str) -> Blocks | None:
    """What config.json says about weights in fp8; None: nothing. Raises ConfigError for a kind that nobody
    reads."""
    given = config.get("quantization_config")
    if not given:
        return None
    method = given.get("quant_method") if isinstance(given, dict) else given
    if method == MXFP4:
        return None
    if method != "fp8":
        raise ConfigError(f"{where}: quantised with {show(method)}, which is not supported; take "
                          "the unquantised checkpoint, one in block-scaled fp8 or in MXFP4, or a GGUF")
    size, kind = given.get("weight_block_size"), given.get("fmt", "e4m3")
    if kind not in ("e4m3", "float8_e4m3fn") or not (
            isinstance(size, list) and len(size) == 2 and all(type(n) is int and n >= 1 for n in size)):
        raise ConfigError(f"{where}: quantised with fp8 of fmt {show(kind)} and weight_block_size "
                          f"{show(size)}; supported: e4m3 in blocks of two dimensions, such as [128, 128]")
    return Blocks(*size)
