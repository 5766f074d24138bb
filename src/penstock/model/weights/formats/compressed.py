"""compressed-tensors, as llm-compressor writes it: int4 and int8 in words, int8 and fp8 as they are, NVFP4 and MX.

Which modules are quantised is read from the files' headers: the config's `ignore` has patterns, and names that
differ from those in the files.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.config.base.errors import ConfigError, show
from penstock.model.weights.formats.groups import check_groups, format_of_groups, grouped, read_groups
from penstock.model.weights.formats.reader import FLOATS, Format, WeightReader, check, group_size, integers, missing
from penstock.model.weights.safetensors_file import StoredTensor

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.kernels.types.packed import Packed

PACKED = "pack-quantized"
# Format -> what weights it may have: type and bits.
_FORMATS = {
    PACKED: (("int", 4), ("int", 8)), "int-quantized": (("int", 8),), "float-quantized": (("float", 8),),
    "naive-quantized": (("int", 8), ("float", 8)), "nvfp4-pack-quantized": (("float", 4),),
    "mxfp4-pack-quantized": (("float", 4),), "mxfp8-quantized": (("float", 8),)}
_TAKE = ("supported: pack-quantized int4 and int8, int-quantized int8, float-quantized fp8, nvfp4-pack-quantized, "
         "mxfp4-pack-quantized, mxfp8-quantized; take one of these, or the unquantised checkpoint")


class CompressedReader(WeightReader):
    """`quant_method` compressed-tensors, of the formats in `_FORMATS`. Weights without zero points only, but for
    integers."""

    label = "compressed-tensors"
    beside = frozenset(("weight", "weight_packed", "weight_scale", "weight_global_scale", "weight_zero_point",
                        "weight_g_idx", "weight_shape", "input_zero_point"))

    def __init__(self, given: Mapping[str, Any], where: str) -> None:
        top, groups = given.get("format"), given.get("config_groups")
        what = f"{where}: quantised with 'compressed-tensors' of format {show(top)}"
        if not isinstance(groups, dict) or not groups or not all(
                isinstance(group, dict) and isinstance(group.get("weights"), dict)
                for group in groups.values()):
            raise ConfigError(f"{what} without config_groups that say how weights are; {_TAKE}")
        sparse = given.get("sparsity_config")
        if given.get("transform_config") or (isinstance(sparse, dict) and sparse.get("format", "dense") != "dense"):
            raise ConfigError(f"{what} with a transform_config or a sparsity_config, which are not supported; "
                              "take one without")
        self._said: dict[str, Any] = {"size": 0, "bits": 0, "rows": 0, "cols": 0}
        for group in groups.values():
            self._group(group["weights"], group.get("format") or top, what)
            if group["weights"].get("type") == "int":
                self.kind = "u8"
        if len(groups) == 1 and self._said["size"] > 0:
            self.format = integers(self._said["bits"], 1, self._said["size"], self._said["size"])

    def _group(self, weights: Mapping[str, Any], kind: object, what: str) -> None:
        bits, of, said = weights.get("num_bits"), weights.get("type"), self._said
        if (of, bits) not in _FORMATS.get(str(kind), ()):
            raise ConfigError(f"{what}, {show(kind)} with {show(bits)} bits of type {show(of)}, which is not "
                              f"supported; {_TAKE}")
        size, block = weights.get("group_size"), weights.get("block_structure")
        if kind == PACKED:
            if said["bits"] not in (0, bits):
                raise ConfigError(f"{what}: packed weights of {said['bits']} and of {bits} bits in one "
                                  f"checkpoint are not supported; {_TAKE}")
            said |= {"bits": bits, "size": size if type(size) is int else 0}
        if weights.get("strategy") == "block":
            if not (isinstance(block, list) and len(block) == 2 and all(
                    type(n) is int and n >= 1 for n in block)):
                raise ConfigError(f"{what}: block_structure {show(block)}; expected two sizes, such as "
                                  "[128, 128]")
            said |= {"rows": block[0], "cols": block[1]}

    def parts(self, module: Mapping[str, StoredTensor], where: str) -> tuple[str, ...]:
        scale = module.get("weight_scale")
        entry = module.get("weight_packed") or module.get("weight")
        if entry is not None and scale is not None and grouped(entry, scale):
            factor = module.get("weight_global_scale")
            check_groups(entry, scale, factor, "weight_global_scale", where)
            if "weight_zero_point" in module:
                raise ConfigError(f"{where} and has zero points; {_TAKE}")
            [name] = (part for part, stored in module.items() if stored is entry)
            return (name, "weight_scale", *(("weight_global_scale",) if factor else ()))
        if "weight_packed" in module:
            if scale is None:
                raise missing("weight_scale", where)
            return self._packed_parts(module, module["weight_packed"], where)
        if entry is None or entry.dtype not in ("F8_E4M3", "I8"):
            return ()
        if len(entry.shape) != 2:
            raise ConfigError(f"{where}; supported: two dimensions, each expert in tensors of its own")
        check(scale, "weight_scale", FLOATS, () if scale is None else scale.shape, where)
        assert scale is not None
        if self._kind(entry.shape, scale.shape) is None:
            raise ConfigError(f"{where}; its weight_scale has shape {scale.shape}, expected one scale, one per "
                              "row, or those of groups or blocks as in config.json")
        zero = module.get("weight_zero_point")
        if zero is not None and entry.dtype == "I8":
            check(zero, "weight_zero_point", ("I8",), scale.shape, where)
            return "weight", "weight_scale", "weight_zero_point"
        return "weight", "weight_scale"

    def _packed_parts(self, module: Mapping[str, StoredTensor], entry: StoredTensor,
                      where: str) -> tuple[str, ...]:
        bits, scale = self._said["bits"], module.get("weight_scale")
        if len(entry.shape) != 2 or entry.dtype != "I32" or not bits:
            raise ConfigError(f"{where}; supported: I32 of two dimensions where config.json says "
                              "pack-quantized")
        rows, columns = entry.shape[0], entry.shape[1] * 32 // bits
        groups = scale.shape[1] if scale is not None and len(scale.shape) == 2 else 1
        check(scale, "weight_scale", FLOATS, (rows, groups), where)
        if self._columns(columns, groups) is None:
            raise ConfigError(f"{where}; its {groups} groups do not share {columns} columns")
        found = ["weight_packed", "weight_scale"]
        if "weight_zero_point" in module:
            check(module["weight_zero_point"], "weight_zero_point", ("I32",), (-(-rows * bits // 32), groups),
                  where)
            found.append("weight_zero_point")
        if "weight_g_idx" in module:
            check(module["weight_g_idx"], "weight_g_idx", ("I32", "I64"), module["weight_g_idx"].shape[:1],
                  where)
            found.append("weight_g_idx")
        return tuple(found)

    def format_of(self, module: Mapping[str, StoredTensor]) -> Format | None:
        entry, scale = module.get("weight_packed") or module["weight"], module["weight_scale"]
        if entry.dtype == "I32" and "weight_g_idx" not in module:
            bits = self._said["bits"]
            found = self._columns(entry.shape[1] * 32 // bits, scale.shape[1])
            return None if found is None else integers(bits, 1, *found)
        if grouped(entry, scale):
            return format_of_groups(entry, scale)
        block = self._kind(entry.shape, scale.shape) if entry.dtype in ("I8", "F8_E4M3") else None
        if block is None:
            return None
        return Format("e4m3", *block) if entry.dtype == "F8_E4M3" else integers(8, block[0], entry.shape[1], block[1])

    def _columns(self, stored: int, groups: int) -> tuple[int, int] | None:
        """Columns, and those of a group. The last word may be filled up: groups say by how much."""
        size = self._said["size"]
        unit = 32 // self._said["bits"]
        if size > 0 and 0 <= stored - groups * size < unit:
            return groups * size, size
        found = group_size(stored, groups, size)
        return None if found is None else (stored, found)

    def read(self, module: Mapping[str, Tensor]) -> Tensor | Packed:
        from penstock.model.weights.formats.values import groups, packed, unpacked

        scale, zero, group_I = (module.get(name) for name in (
            "weight_scale", "weight_zero_point", "weight_g_idx"))
        assert scale is not None
        factor, weight = module.get("weight_global_scale"), module.get("weight_packed", module.get("weight"))
        assert weight is not None
        if factor is not None or scale.dtype.itemsize == 1:
            return read_groups(weight, scale if factor is None else scale.float() / factor)
        if "weight_packed" in module:
            bits = self._said["bits"]
            code_OI = unpacked(module["weight_packed"], bits)
            found = self._columns(code_OI.shape[1], scale.shape[1])
            assert found is not None
            columns, size = found
            rows = len(code_OI)
            # Zero points are packed along the rows, whose last word is filled up.
            zero_OG = 1 << bits - 1 if zero is None else unpacked(zero.T, bits).T[:rows]
            if group_I is not None and int(group_I.min()) < 0:      # written before it was known
                group_I = None
            return groups(code_OI[:, :columns], scale, zero_OG, size, group_I)
        kind = self._kind(tuple(weight.shape), tuple(scale.shape))
        assert kind is not None
        rows, columns = kind
        blocks = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
        return packed(weight, scale.reshape(blocks), 0 if zero is None else zero.reshape(blocks), rows, columns)

    def _kind(self, shape: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, int] | None:
        """Rows and columns that share a scale."""
        outputs, inputs = shape
        if scales in ((), (1,), (1, 1)):
            return outputs, inputs
        if scales in ((outputs,), (outputs, 1)):
            return 1, inputs
        rows, cols = self._said["rows"], self._said["cols"]
        if rows and scales == (-(-outputs // rows), -(-inputs // cols)):
            return rows, cols
        if len(scales) == 2 and scales[0] == outputs and inputs % scales[1] == 0:
            return 1, inputs // scales[1]
        return None
