"""ModelOpt: fp8 by tensor, row or block, MXFP8 and NVFP4, as NVIDIA ships them.

Which modules are quantised, and how, is read from the headers: MIXED_PRECISION gives modules different formats.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.config.base.errors import ConfigError, show
from penstock.model.weights.formats.groups import check_groups, format_of_groups, grouped, read_groups
from penstock.model.weights.formats.reader import FLOATS, Format, WeightReader, check, missing
from penstock.model.weights.safetensors_file import StoredTensor

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.kernels.types.packed import Packed

_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP8", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION")
_BLOCK = 128                    # rows and columns of FP8_PB_WO
_CHANGED = frozenset(("pre_quant_scale", "svdquant_lora_a", "svdquant_lora_b"))     # inputs or outputs are, too
_TAKE = f"supported: {', '.join(_ALGORITHMS)}; take one of these, or the unquantised checkpoint"


class ModelOptReader(WeightReader):
    """`quant_method` modelopt, in config.json or hf_quant_config.json."""

    label = "ModelOpt"
    beside = frozenset(("weight", "weight_scale", "weight_scale_2")) | _CHANGED

    def __init__(self, given: Mapping[str, Any], where: str) -> None:
        layers = given.get("quantized_layers")
        said = [given.get("quant_algo"), *(layer.get("quant_algo") for layer in (
            layers.values() if isinstance(layers, dict) else ()) if isinstance(layer, dict))]
        for algorithm in said:
            if not isinstance(algorithm, str) or algorithm.upper() not in _ALGORITHMS:
                raise ConfigError(f"{where}: quantised by 'modelopt' with {show(algorithm)}, which is not supported; "
                                  f"{_TAKE}")

    def parts(self, module: Mapping[str, StoredTensor], where: str) -> tuple[str, ...]:
        entry, scale = module.get("weight"), module.get("weight_scale")
        if changed := sorted(_CHANGED & module.keys()):
            raise ConfigError(f"{where}; a module with {changed[0]} is not supported; {_TAKE}")
        if entry is None or entry.dtype not in ("F8_E4M3", "U8"):
            return ()
        factor = module.get("weight_scale_2")
        if scale is None:
            raise missing("weight_scale", where)
        if grouped(entry, scale):
            check_groups(entry, scale, factor, "weight_scale_2", where)
            return ("weight", "weight_scale", *(("weight_scale_2",) if factor else ()))
        if len(entry.shape) != 2 or entry.dtype == "U8" or factor is not None:
            raise ConfigError(f"{where}, which is not supported; each expert must have tensors of its own; {_TAKE}")
        check(scale, "weight_scale", FLOATS, scale.shape, where)
        if _block(entry.shape, scale.shape) is None:
            raise ConfigError(f"{where}; its weight_scale has shape {scale.shape}, expected one scale, one per row, or "
                              f"one per {_BLOCK} x {_BLOCK}")
        return "weight", "weight_scale"

    def format_of(self, module: Mapping[str, StoredTensor]) -> Format | None:
        weight, scale = module["weight"], module["weight_scale"]
        if grouped(weight, scale):
            return format_of_groups(weight, scale)
        block = _block(weight.shape, scale.shape)
        return None if block is None else Format("e4m3", *block)

    def read(self, module: Mapping[str, Tensor]) -> Packed:
        from penstock.model.weights.formats.values import packed

        weight, scale = module["weight"], module["weight_scale"]
        if not weight.is_floating_point() or not scale.is_floating_point():
            factor = module.get("weight_scale_2")
            return read_groups(weight, scale if factor is None else scale.float() * factor)
        block = _block(tuple(weight.shape), tuple(scale.shape))
        assert block is not None
        rows, cols = block
        return packed(weight, scale.reshape(-(-weight.shape[0] // rows), -1), 0, rows, cols)


def _block(shape: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, int] | None:
    """Rows and columns that share a scale."""
    outputs, inputs = shape
    if scales in ((), (1,), (1, 1)):
        return outputs, inputs
    if scales in ((outputs,), (outputs, 1)):
        return 1, inputs
    up, left = -(-outputs // _BLOCK), -(-inputs // _BLOCK)
    return (_BLOCK, _BLOCK) if scales in ((up, 1, left, 1), (up, left)) else None
