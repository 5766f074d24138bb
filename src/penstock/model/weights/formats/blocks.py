"""fp8 weights with a scale for each block of rows and columns, as DeepSeek-V3 and MiniMax-M3 ship them; or with one
for each row or for all, as Mistral's and fbgemm's are."""
from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any

from penstock.config.base.errors import ConfigError, show
from penstock.model.weights.formats.reader import FLOATS, Format, WeightReader, check
from penstock.model.weights.safetensors_file import StoredTensor

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.kernels.types.packed import Packed

SCALE = "weight_scale_inv"          # multiplies, in spite of its name


def quantises(name: str) -> bool:
    """Whether the weight of this name is in fp8 in checkpoints that are: the projections of a layer, not its
    router, nor the weights of an indexer's heads."""
    return name.endswith("_proj.weight") and not name.endswith(".weights_proj.weight")


class BlocksReader(WeightReader):
    """`quant_method` fp8 with a `weight_block_size`, and mxfp8, whose scales are powers of two of 32 columns."""

    label, kind = "fp8 in blocks", "e4m3"
    beside = frozenset(("weight", "weight_scale", SCALE))

    def __init__(self, given: Mapping[str, Any], where: str) -> None:
        size, kind = given.get("weight_block_size"), given.get("fmt", "e4m3")
        if kind not in ("e4m3", "float8_e4m3fn") or not (
                isinstance(size, list) and len(size) == 2 and all(type(n) is int and n >= 1 for n in size)):
            raise ConfigError(f"{where}: quantised with fp8 of fmt {show(kind)} and weight_block_size "
                              f"{show(size)}; supported: e4m3 in blocks of two dimensions, such as [128, 128]")
        self.format: Format = Format("e4m3", *size)

    def parts(self, module: Mapping[str, StoredTensor], where: str) -> tuple[str, ...]:
        entry, name = module.get("weight"), _scale(module)
        scale = module.get(name)
        if entry is None or entry.dtype != "F8_E4M3":
            return ()
        if len(entry.shape) != 2 or scale is None:
            raise ConfigError(f"{where}; supported: weights of two dimensions with their scales in "
                              f"{show(f'{entry.name}_scale_inv')}, which "
                              + ("no file holds" if scale is None else "is there"))
        if scale.shape != self.format.scales(entry.shape) or scale.dtype not in ("F32", "BF16", "U8"):
            raise ConfigError(f"{where}; its scales are {scale.dtype} of shape {scale.shape}, expected F32 of "
                              f"{self.format.scales(entry.shape)}")
        return "weight", name

    def read(self, module: Mapping[str, Tensor]) -> Packed:
        from penstock.model.weights.formats.values import packed, power

        scale = module[_scale(module)]
        scale = scale if scale.is_floating_point() else power(scale)
        return packed(module["weight"], scale, 0, self.format.rows, self.format.cols)


class RowsReader(WeightReader):
    """`quant_method` fp8 without a `weight_block_size`, and fbgemm_fp8. Activations are not quantised."""

    label = "fp8"
    beside = frozenset(("weight", "weight_scale", SCALE))

    def __init__(self, given: Mapping[str, Any], where: str) -> None:
        """What decides is in the files."""

    def parts(self, module: Mapping[str, StoredTensor], where: str) -> tuple[str, ...]:
        entry = module.get("weight")
        if entry is None or entry.dtype != "F8_E4M3":
            return ()
        if len(entry.shape) != 2:
            raise ConfigError(f"{where}; supported: two dimensions, each expert in tensors of its own")
        name = _scale(module)
        scale, rows = module.get(name), entry.shape[0]
        one = scale is not None and scale.shape in ((), (1,), (1, 1), (rows,))
        check(scale, name, FLOATS, scale.shape if scale is not None and one else (rows, 1), where)
        return "weight", name

    def format_of(self, module: Mapping[str, StoredTensor]) -> Format | None:
        rows, columns = module["weight"].shape
        scale = module[_scale(module)]
        return Format("e4m3", 1 if prod(scale.shape) > 1 else rows, columns)

    def read(self, module: Mapping[str, Tensor]) -> Packed:
        from penstock.model.weights.formats.values import packed

        weight, scale = module["weight"], module[_scale(module)]
        rows = 1 if scale.numel() > 1 else weight.shape[0]
        return packed(weight, scale.reshape(-1, 1), 0, rows, weight.shape[1])


def _scale(module: Mapping[str, object]) -> str:
    """Which of a module's tensors has its scales."""
    return SCALE if SCALE in module else "weight_scale"


def fp8_reader(given: Mapping[str, Any], where: str) -> BlocksReader | RowsReader:
    """Return the reader of `quant_method` fp8 or mxfp8: without blocks the config says how activations are scaled."""
    if given.get("quant_method") == "mxfp8":
        given = {**given, "weight_block_size": given.get("weight_block_size") or [1, 32]}
    rows = given.get("weight_block_size") is None and given.get("activation_scheme") in ("static", "dynamic")
    return RowsReader(given, where) if rows else BlocksReader(given, where)
