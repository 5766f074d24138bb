"""Floats of four and eight bits of which 16 or 32 columns share a small float: NVFP4, MXFP4 and MXFP8.

Owns their layout; which tensors are so, and NVFP4's second factor, is what a file's format says.
Source: OCP Microscaling Formats (MX) 1.0, section 5; of two elements in a byte the low half is first.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.config.base.errors import ConfigError
from penstock.model.weights.formats.reader import Format, check
from penstock.model.weights.safetensors_file import StoredTensor

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.kernels.types.packed import Packed

# Types of elements and of scales -> columns that share one.
_COLUMNS = {("U8", "F8_E4M3"): 16, ("U8", "U8"): 32, ("F8_E4M3", "U8"): 32}


def grouped(weight: StoredTensor, scale: StoredTensor) -> bool:
    """Whether they are one of these formats, by their types."""
    return (weight.dtype, scale.dtype) in _COLUMNS


def format_of_groups(weight: StoredTensor, scale: StoredTensor) -> Format:
    """Return how such a weight stays packed."""
    columns = _COLUMNS[weight.dtype, scale.dtype]
    return Format("e2m1", 1, columns, 4) if weight.dtype == "U8" else Format("e4m3", 1, columns)


def check_groups(weight: StoredTensor, scale: StoredTensor, factor: StoredTensor | None, name: str, where: str) -> None:
    """Raises ConfigError: tensors that do not fit. name: of the factor, which NVFP4 has and the others have not."""
    if len(weight.shape) != 2:
        raise ConfigError(f"{where}; supported: two dimensions, each expert in tensors of its own")
    columns = weight.shape[1] * (2 if weight.dtype == "U8" else 1)
    size = _COLUMNS[weight.dtype, scale.dtype]
    check(scale, "weight_scale", (scale.dtype,), (weight.shape[0], -(-columns // size)), where)
    if scale.dtype == "F8_E4M3":
        check(factor, name, ("F32",), factor.shape if factor and factor.shape in ((), (1,)) else (1,), where)
    elif factor is not None:
        raise ConfigError(f"{where}; its {name} does not go with scales of {scale.dtype}, which are powers of two")


def read_groups(weight: Tensor, scale_OG: Tensor) -> Packed:
    """The weight. scale_OG: uint8, powers of two of 32 columns, or float32, NVFP4's with its second factor."""
    from penstock.model.weights.formats.values import e2m1, packed, power

    columns = 16 if scale_OG.is_floating_point() else 32
    scale_OG = scale_OG if scale_OG.is_floating_point() else power(scale_OG)
    if weight.is_floating_point():
        return packed(weight, scale_OG, 0, 1, columns)
    return e2m1(weight, scale_OG, columns)
