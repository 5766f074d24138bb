"""AWQ, GPTQ and AutoRound: 4 or 8 bits in words, transposed: rows of the files are columns of the weight.

Bits and groups of each module are read from the headers: GPTQ's `dynamic` may give modules others.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.config.base.errors import ConfigError, show
from penstock.model.weights.formats.reader import FLOATS, Format, WeightReader, check, group_size, integers
from penstock.model.weights.safetensors_file import StoredTensor

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.kernels.types.packed import Packed

_BESIDE = frozenset(("weight", "qweight", "qzeros", "scales", "g_idx"))
# A word of AWQ has outputs 0, 2, 4, 6, 1, 3, 5, 7: output i is at this place.
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
_PLUS = {"gptq": 1, "gptq_v2": 0}                       # what is added to a stored zero point
_AUTOROUND = {"auto_round:auto_gptq": "gptq", "auto_round": "gptq_v2", "auto_round:gptqmodel": "gptq_v2"}


def _number(given: Mapping[str, Any], name: str) -> int:
    value = given.get(name)
    return value if type(value) is int else 0


def _module(module: Mapping[str, StoredTensor], where: str, size: int, bits: tuple[int, ...], *,
            along: bool) -> tuple[int, int]:
    """(bits, columns of a group) of a module. along: words hold columns, as GPTQ's do. Raises ConfigError."""
    for name in ("qweight", "qzeros", "scales"):
        entry = module.get(name)
        if entry is not None and len(entry.shape) != 2:
            raise ConfigError(f"{where}; its {name} has shape {entry.shape}; supported: two dimensions, each "
                              "expert in tensors of its own")
        check(entry, name, FLOATS if name == "scales" else ("I32",), entry.shape if entry else (), where)
    groups, rows = module["scales"].shape
    wide = 32 * module["qzeros"].shape[1]
    found = wide // rows
    if wide % rows or found not in bits:
        raise ConfigError(f"{where}, with zero points of {wide / rows:g} bits; supported: "
                          f"{' or '.join(map(str, bits))}")
    down = module["qweight"].shape[0]
    columns = down * 32 // found if along else down
    check(module["qweight"], "qweight", ("I32",),
          (down, rows if along else rows * found // 32), where)
    check(module["qzeros"], "qzeros", ("I32",), (groups, rows * found // 32), where)
    each = group_size(columns, groups, size)
    if each is None:
        raise ConfigError(f"{where}; its {groups} groups do not share {columns} columns")
    return found, each


class AwqReader(WeightReader):
    """`quant_method` awq of version gemm."""

    label, beside, kind = "AWQ", _BESIDE, "u8"

    def __init__(self, given: Mapping[str, Any], where: str) -> None:
        version, bits = given.get("version", "gemm"), given.get("bits", given.get("w_bit"))
        if str(version).lower() != "gemm" or bits != 4 or given.get("zero_point") is False:
            raise ConfigError(f"{where}: quantised with 'awq' of version {show(version)}, {show(bits)} bits and "
                              f"zero_point {show(given.get('zero_point'))}; supported: gemm, 4 bits, zero "
                              "points; take such a checkpoint, or the unquantised one")
        self._size = _number(given, "group_size") or _number(given, "q_group_size")
        if self._size > 0:
            self.format = integers(4, 1, self._size, self._size)

    def parts(self, module: Mapping[str, StoredTensor], where: str) -> tuple[str, ...]:
        if "qweight" not in module:
            return ()
        _module(module, where, self._size, (4,), along=False)
        return "qweight", "scales", "qzeros"

    def format_of(self, module: Mapping[str, StoredTensor]) -> Format | None:
        bits, size = _module(module, "", self._size, (4,), along=False)
        return integers(bits, 1, module["qweight"].shape[0], size)

    def read(self, module: Mapping[str, Tensor]) -> Tensor | Packed:
        from penstock.model.weights.formats.values import groups, unpacked

        code_OI, zero_OG = (_in_order(unpacked(module[name], 4)).T for name in ("qweight", "qzeros"))
        scale_OG = module["scales"].T
        size = group_size(code_OI.shape[1], scale_OG.shape[1], self._size)
        assert size is not None
        return groups(code_OI, scale_OG, zero_OG, size)


def _in_order(code_IO: Tensor) -> Tensor:
    return code_IO.view(len(code_IO), -1, 8)[:, :, list(_PLACES)].flatten(1)


class GptqReader(WeightReader):
    """`quant_method` gptq, and AutoRound's packings that equal it."""

    beside, kind = _BESIDE, "u8"

    def __init__(self, given: Mapping[str, Any], where: str) -> None:
        method, bits = given.get("quant_method"), given.get("bits")
        packing = given.get("packing_format")
        form = given.get("checkpoint_format") or "gptq" if method == "gptq" else _AUTOROUND.get(str(packing))
        if form not in _PLUS or bits not in (4, 8):
            raise ConfigError(f"{where}: quantised with {show(method)} of {show(bits)} bits and "
                              + (f"checkpoint_format {show(form)}; supported: {', '.join(_PLUS)}"
                                 if method == "gptq" else
                                 f"packing_format {show(packing)}; supported: {', '.join(_AUTOROUND)}")
                              + " of 4 or 8 bits; take such a checkpoint, or the unquantised one")
        self.label = "GPTQ" if method == "gptq" else "AutoRound"
        self._size, self._plus, self._ordered = _number(given, "group_size"), _PLUS[form], bool(given.get("desc_act"))
        if self._size > 0 and not self._ordered and not given.get("dynamic"):
            self.format = integers(bits, 1, self._size, self._size)

    def parts(self, module: Mapping[str, StoredTensor], where: str) -> tuple[str, ...]:
        if "qweight" not in module:
            return ()
        bits, _ = _module(module, where, self._size, (4, 8), along=True)
        if "g_idx" not in module:
            return "qweight", "scales", "qzeros"
        check(module["g_idx"], "g_idx", ("I32", "I64"), (module["qweight"].shape[0] * 32 // bits,), where)
        return "qweight", "scales", "qzeros", "g_idx"

    def format_of(self, module: Mapping[str, StoredTensor]) -> Format | None:
        bits, size = _module(module, "", self._size, (4, 8), along=True)
        return None if self._ordered else integers(bits, 1, module["qweight"].shape[0] * 32 // bits, size)

    def read(self, module: Mapping[str, Tensor]) -> Tensor | Packed:
        from penstock.model.weights.formats.values import groups, unpacked

        scale_OG = module["scales"].T
        bits = 32 * module["qzeros"].shape[1] // len(scale_OG)
        code_OI = unpacked(module["qweight"].T, bits)
        # Up to 16 of four bits: v1 stores one less, and a sum is not cut to the bits that it came from.
        zero_OG = unpacked(module["qzeros"], bits).T.short() + self._plus
        size = group_size(code_OI.shape[1], scale_OG.shape[1], self._size)
        assert size is not None
        return groups(code_OI, scale_OG, zero_OG, size, module.get("g_idx"))
