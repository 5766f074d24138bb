"""fp8 weights with a scale for each block of rows and columns, as DeepSeek-V3 and others ship them."""
from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.config.base.errors import ConfigError, show
from penstock.model.weights.fp8 import Blocks
from penstock.model.weights.safetensors_file import StoredTensor

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.kernels.types.scaled import Scaled

SCALE = "weight_scale_inv"          # multiplies, in spite of its name


class BlocksReader:
    """`quant_method` fp8 with a `weight_block_size`."""

    label = "fp8 in blocks"
    beside = frozenset(("weight", SCALE))

    def __init__(self, given: Mapping[str, Any], where: str) -> None:
        size, kind = given.get("weight_block_size"), given.get("fmt", "e4m3")
        if kind not in ("e4m3", "float8_e4m3fn") or not (
                isinstance(size, list) and len(size) == 2 and all(type(n) is int and n >= 1 for n in size)):
            raise ConfigError(f"{where}: quantised with fp8 of fmt {show(kind)} and weight_block_size "
                              f"{show(size)}; supported: e4m3 in blocks of two dimensions, such as [128, 128]")
        self.blocks = Blocks(*size)

    def parts(self, module: Mapping[str, StoredTensor], where: str) -> tuple[str, ...]:
        entry, scale = module.get("weight"), module.get(SCALE)
        if entry is None or entry.dtype != "F8_E4M3":
            return ()
        if len(entry.shape) != 2 or scale is None:
            raise ConfigError(f"{where}; supported: weights of two dimensions with their scales in "
                              f"{show(f'{entry.name}_scale_inv')}, which "
                              + ("no file holds" if scale is None else "is there"))
        if scale.shape != self.blocks.scales(entry.shape) or scale.dtype not in ("F32", "BF16"):
            raise ConfigError(f"{where}; its scales are {scale.dtype} of shape {scale.shape}, expected F32 of "
                              f"{self.blocks.scales(entry.shape)}")
        return "weight", SCALE

    def read(self, module: Mapping[str, Tensor]) -> Scaled:
        from penstock.model.weights.formats.values import scaled

        return scaled(module["weight"], module[SCALE], self.blocks.rows, self.blocks.cols)
