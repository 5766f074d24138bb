"""Quantised weights as their formats define them, written apart from the readers: bit by bit, in words.

A packer takes a weight [O, I] and returns its tensors by the last part of their names, and what they mean.
"""
from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from penstock.config.base.errors import ConfigError
from penstock.model import registry
from penstock.model.weights.checkpoint import open_checkpoint
from penstock.model.weights.locate import locate

Packer = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]


def words(value: Tensor, bits: int) -> Tensor:
    """int32: values along the last axis, the first in the lowest bits; the last word filled up with zeros."""
    each = 32 // bits
    value = torch.nn.functional.pad(value.long(), (0, -value.shape[-1] % each)).unflatten(-1, (-1, each))
    word = (value << torch.arange(each) * bits).sum(-1)
    return torch.where(word >= 1 << 31, word - (1 << 32), word).int()


def grouped(weight: Tensor, group: int, bits: int, symmetric: bool,
            least: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes [O, I], scales and zero points [O, G], and what they mean; scales are numbers of f16. The last
    group may be smaller. least: of zero points."""
    inputs, top = weight.shape[1], (1 << bits) - 1
    index = torch.arange(inputs) // group
    low, high = (torch.stack([part(-1).values for part in (
        getattr(weight[:, index == g], name) for g in range(int(index[-1]) + 1))], 1) for name in ("min", "max"))
    low, high = low.clamp_max(0), high.clamp_min(0)
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    scale = ((high - low) / top).clamp_min(1e-6).half().float()
    zero = torch.full_like(scale, 1 << bits - 1) if symmetric else (-low / scale).round().clamp(least, top)
    code = ((weight / scale[:, index]).round() + zero[:, index]).clamp(0, top)
    return code.int(), scale, zero.int(), (code - zero[:, index]) * scale[:, index]


def compressed_int(weight: Tensor, group: int, bits: int = 4, symmetric: bool = True) -> tuple[dict, Tensor]:
    """pack-quantized: along the columns; zero points along the rows."""
    code, scale, zero, twin = grouped(weight, group or weight.shape[1], bits, symmetric)
    tensors = {"weight_packed": words(code, bits), "weight_scale": scale.bfloat16() if not group else scale,
               "weight_shape": torch.tensor(weight.shape)}
    if not group:
        twin = (code - zero) * tensors["weight_scale"].float()
    if not symmetric:
        tensors["weight_zero_point"] = words(zero.T, bits).T.contiguous()
    return tensors, twin


def compressed_int8(weight: Tensor, channel: bool = True) -> tuple[dict, Tensor]:
    scale = (weight.abs().amax(1, keepdim=True) if channel else weight.abs().amax().view(1)) / 127
    code = (weight / scale).round()
    return {"weight": code.to(torch.int8), "weight_scale": scale}, code * scale


def compressed_fp8(weight: Tensor, channel: bool = True) -> tuple[dict, Tensor]:
    scale = (weight.abs().amax(1, keepdim=True) if channel else weight.abs().amax().view(1)) / 448
    scale = scale.clamp_min(1e-12)          # a row may be zeros
    code = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": code, "weight_scale": scale}, code.float() * scale


E2M1 = torch.tensor([0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6])


def halves(value: Tensor) -> Tensor:
    """uint8: the nearest of e2m1, two in a byte, the first in the low half. An even number of columns."""
    code = (value[..., None] - E2M1).abs().argmin(-1)
    return (code[:, ::2] | code[:, 1::2] << 4).to(torch.uint8)


def meant(byte: Tensor) -> Tensor:
    return E2M1[torch.stack((byte & 15, byte >> 4), -1).flatten(1).long()]


def largest(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Of each group of columns, the last of which may be smaller, and the group of each column."""
    index = torch.arange(weight.shape[1]) // group
    return torch.stack([weight[:, index == g].abs().amax(1) for g in range(int(index[-1]) + 1)], 1), index


def nvfp4(weight: Tensor, modelopt: bool = False) -> tuple[dict, Tensor]:
    """Scales of e4m3 and a factor: compressed-tensors stores what divides them, ModelOpt what multiplies."""
    most, index = largest(weight, 16)
    factor = most.amax().view(1) / (6 * 448)
    scale = (most / 6 / factor).to(torch.float8_e4m3fn)
    if modelopt:
        kept, names = scale.float() * factor, ("weight", "weight_scale_2")
    else:
        factor = 1 / factor
        kept, names = scale.float() / factor, ("weight_packed", "weight_global_scale")
    packed = halves(weight / kept[:, index])
    return {names[0]: packed, "weight_scale": scale, names[1]: factor.view(()) if modelopt else factor,
            **({} if modelopt else {"input_global_scale": torch.ones(1)})}, meant(packed) * kept[:, index]


def mx(weight: Tensor, bits: int) -> tuple[dict, Tensor]:
    """mxfp4 and mxfp8: 32 columns share a power of two, stored 127 up."""
    most, index = largest(weight, 32)
    power = most.log2().floor().int() - (2 if bits == 4 else 8)
    scale = torch.exp2(power.float())[:, index]
    stored = {"weight_scale": (power + 127).to(torch.uint8)}
    if bits == 4:
        packed = halves(weight / scale)
        return {"weight_packed": packed, **stored}, meant(packed) * scale
    code = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": code, **stored}, code.float() * scale


def mxfp8(weight: Tensor) -> tuple[dict, Tensor]:
    """As MiniMax-M3's maker names the scales."""
    tensors, twin = mx(weight, 8)
    return {"weight": tensors["weight"], "weight_scale_inv": tensors["weight_scale"]}, twin


def modelopt_blocks(weight: Tensor) -> tuple[dict, Tensor]:
    """FP8_PB_WO: 128 x 128 elements share a scale [R, 1, J, 1]."""
    up, left = (-(-n // 128) for n in weight.shape)
    scale = torch.rand(up, left) + weight.abs().amax() / 448
    wide = scale.repeat_interleave(128, 0)[:len(weight)].repeat_interleave(128, 1)[:, :weight.shape[1]]
    code = (weight / wide).to(torch.float8_e4m3fn)
    return {"weight": code, "weight_scale": scale[:, None, :, None]}, code.float() * wide


def gptq(weight: Tensor, group: int, bits: int = 4, symmetric: bool = True, less: int = 1,
         order: Tensor | None = None) -> tuple[dict, Tensor]:
    """Along the columns, transposed. less: what a stored zero point is less than the real one. order: the
    group of each column is that of its place in it."""
    given = weight if order is None else weight[:, order]
    code, scale, zero, twin = grouped(given, group, bits, symmetric, less)      # v1 has no 0
    index = torch.arange(weight.shape[1]) // group
    if order is not None:
        back = order.argsort()
        code, twin, index = code[:, back], twin[:, back], index[back]
    return {"qweight": words(code, bits).T.contiguous(), "scales": scale.T.half().contiguous(),
            "qzeros": words((zero.T - less) & (1 << bits) - 1, bits), "g_idx": index.int()}, twin


def awq(weight: Tensor, group: int) -> tuple[dict, Tensor]:
    """Along the rows, transposed; eight outputs of a word in AutoAWQ's order."""
    code, scale, zero, twin = grouped(weight, group, 4, symmetric=False)

    def interleaved(value_XO: Tensor) -> Tensor:
        return words(value_XO.unflatten(1, (-1, 8))[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1), 4)

    return {"qweight": interleaved(code.T), "qzeros": interleaved(zero.T),
            "scales": scale.T.half().contiguous()}, twin


def compressed_config(form: str, **weights: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, **weights}
    return {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head", "re:.*gate$"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


GROUP = {"strategy": "group", "num_bits": 4}
SMALL = {"type": "float", "num_bits": 4, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
NVFP4 = {**SMALL, "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": False}
FORMATS: dict[str, tuple[dict[str, Any], Packer]] = {
    "int4": (compressed_config("pack-quantized", **GROUP, group_size=16), partial(compressed_int, group=16)),
    "int4 asymmetric": (compressed_config("pack-quantized", **GROUP, group_size=8, symmetric=False),
                        partial(compressed_int, group=8, symmetric=False)),
    "int4 channel": (compressed_config("pack-quantized", num_bits=4), partial(compressed_int, group=0)),
    "int8 packed": (compressed_config("pack-quantized", strategy="group", group_size=8),
                    partial(compressed_int, group=8, bits=8)),
    "int8": (compressed_config("int-quantized"), compressed_int8),
    "fp8": (compressed_config("float-quantized", type="float"), compressed_fp8),
    "fbgemm": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, compressed_fp8),
    "nvfp4": (compressed_config("nvfp4-pack-quantized", **NVFP4), nvfp4),
    "mxfp4": (compressed_config("mxfp4-pack-quantized", **SMALL), partial(mx, bits=4)),
    "mxfp8": (compressed_config("mxfp8-quantized", **{**SMALL, "num_bits": 8}), partial(mx, bits=8)),
    "mxfp8, minimax": ({"quant_method": "mxfp8", "activation_scheme": "dynamic", "weight_block_size": [1, 32],
                        "ignored_layers": ["lm_head"]}, mxfp8),
    "modelopt nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, partial(nvfp4, modelopt=True)),
    "modelopt fp8 blocks": ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, modelopt_blocks),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 8, "zero_point": True, "version": "gemm"},
            partial(awq, group=8)),
    "gptq": (_GPTQ, partial(gptq, group=16, symmetric=False)),
    "gptq v2": ({**_GPTQ, "checkpoint_format": "gptq_v2"}, partial(gptq, group=16, symmetric=False, less=0)),
    "auto-round": ({"quant_method": "auto-round", "bits": 4, "group_size": 8, "sym": True,
                    "packing_format": "auto_round:auto_gptq"}, partial(gptq, group=8)),
}


def packed_checkpoint(folder: Path, config: dict[str, Any], form: str,
                      change: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor) -> tuple[str, str]:
    """A model whose matrices of layers are packed, and one of what they mean."""
    given, packer = FORMATS[form]
    packed: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, tensor in registry.dummy_tensors(config, 3):
        plain[name] = packed[name] = change(name, tensor if "norm" in name else tensor * 8)
        if name.endswith("_proj.weight"):
            parts, plain[name] = packer(packed.pop(name))
            packed |= {f"{name.removesuffix('weight')}{part}": t for part, t in parts.items()}
    return _both(folder, config, given, packed, plain)


def stacked_checkpoint(folder: Path, config: dict[str, Any]) -> tuple[str, str]:
    """gpt-oss with the experts of a layer in MXFP4 in one tensor, rows of gate and up in turns; and what they mean."""
    packed: dict[str, Tensor] = {}
    plain = {name: tensor * (1 if "norm" in name else 8) for name, tensor in registry.dummy_tensors(config, 3)}
    for name in [*plain]:
        before, part = name.rsplit(".", 2)[0], name.rsplit(".", 1)[1]
        layer = before.split(".experts.")[0] + ".experts."
        if ".experts." not in name:
            packed[name] = plain[name]
        elif name == f"{layer}0.down_proj.{part}" or name == f"{layer}0.gate_proj.{part}":
            kinds, halves_of = ("down",) if "down" in name else ("gate", "up"), list[Tensor]()
            for expert in range(config["num_local_experts"]):
                names = [f"{layer}{expert}.{kind}_proj.{part}" for kind in kinds]
                halves_of.append(torch.stack([plain[one] for one in names], 1).flatten(0, 1))
            module, all_EO = f"{layer}{'_'.join(kinds)}_proj", torch.stack(halves_of)
            if part == "bias":
                packed[f"{module}_bias"] = all_EO
                continue
            made = [mx(one, 4) for one in all_EO]
            packed[f"{module}_blocks"] = torch.stack([one["weight_packed"].unflatten(1, (-1, 16)) for one, _ in made])
            packed[f"{module}_scales"] = torch.stack([one["weight_scale"] for one, _ in made])
            for expert, (_, twin) in enumerate(made):
                for kind, rows in zip(kinds, twin.unflatten(0, (-1, len(kinds))).unbind(1), strict=True):
                    plain[f"{layer}{expert}.{kind}_proj.weight"] = rows
    return _both(folder, config, {"quant_method": "mxfp4"}, packed, plain)


def _both(folder: Path, config: dict[str, Any], given: dict[str, Any], packed: dict[str, Tensor],
          plain: dict[str, Tensor]) -> tuple[str, str]:
    for where, tensors, more in (("packed", packed, {"quantization_config": given}), ("plain", plain, {})):
        (folder / where).mkdir()
        (folder / where / "config.json").write_text(json.dumps({**config, **more}))
        save_file({n: t.contiguous() for n, t in tensors.items()}, folder / where / "model.safetensors")
    return str(folder / "packed"), str(folder / "plain")


def written(folder: Path, given: dict[str, Any] | None, tensors: dict[str, torch.Tensor]) -> Path:
    more = {} if given is None else {"quantization_config": given}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **more}))
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    return folder


def read(folder: Path, given: dict[str, Any], parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """The weight of a module `a.b`, beside a module of floats."""
    other = torch.rand(3, 5)
    written(folder, given, {**{f"a.b.{part}": t for part, t in parts.items()}, "lm_head.weight": other})
    found = dict(open_checkpoint(locate(str(folder))).tensors())
    assert sorted(found) == ["a.b.weight", "lm_head.weight"] and found["lm_head.weight"].equal(other)
    return found["a.b.weight"]


def refused(folder: Path, given: dict[str, Any] | None, parts: dict[str, torch.Tensor], said: str) -> None:
    """A checkpoint with such a module is refused before a weight is read, in one line that matches `said`."""
    written(folder, given, {f"a.b.{part}": t for part, t in parts.items()})
    with pytest.raises(ConfigError, match=said) as caught:
        open_checkpoint(locate(str(folder)))
    assert "\n" not in str(caught.value)


def weight(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * columns))
