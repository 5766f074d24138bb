"""Packed weights in Triton, interpreted: parts of triton_interpreted.py, in whose process they run."""
from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3}
Check = Callable[[Tensor, Tensor, torch.dtype, object], None]


def scaled(check: Check) -> None:
    """Linears of packed weights over their own cases, and some in float16, the type nearest to a device's."""
    from cases import packed_linear as cases

    from penstock.kernels.gemm.linear import OP, triton_fp8, triton_packed

    triton, reference = OP.use("triton"), OP.use("reference")
    for case in cases.cases():
        if not case.name.startswith("bfloat16"):
            why = case.wrong(case.run(triton), case.run(reference))
            assert not why, why
    for dtype, (rows, inputs), cols in product(TOLERANCES, ((5, 256), (3, 208), (2, 1296)), (128, 0)):
        x = torch.randint(0, 0x7f, (rows, inputs + 8)).to(torch.uint8).view(torch.float8_e4m3fn).float()    # exact ones
        x[:, ::128] = -448.0
        x = (x * torch.tensor([2.0 ** -i for i in range(rows)])[:, None]).to(dtype)[:, :inputs]
        x[0, :128] = 0
        codes, scales = triton_fp8.quantise(x, cols or inputs)
        wide = scales.repeat_interleave(cols or inputs, 1)[:, :inputs]
        check((codes.float() * wide)[:rows], triton_fp8.quantised(x, cols or inputs), torch.float32, ("fp8", inputs))
        assert len(codes) % 4 == 0 and scales.stride(0) == 1
    for shape in cases._SHAPES:
        weight, x = cases.weight_of(*shape).regular(), torch.randn(5, shape[2]).half() / 64
        check(triton_packed.run(x, weight, None), reference(weight, None)(x), torch.float16, ("scaled", shape))
        check(triton_packed.floats(weight, torch.float32), weight.floats(), torch.float32, ("floats", shape))
        x, triton_packed.PIECE = torch.randn(70, shape[2]), 1 << 12
        check(triton_packed.many(x, weight, None), reference(weight, None)(x), torch.float32, ("pieces", shape))
        bias = torch.randn(shape[1])
        for split in (1, 3):
            got = triton_packed.run(x, weight, bias, split=split)
            check(got, reference(weight, bias)(x), torch.float32, ("tile", shape, split))


# In the text of `kernels.triton.tiles`: the kind that must see it, what is there, what takes its place.
FAULTS = {
    "halves swapped": ("u4", "low, high = byte & 15, byte >> 4", "high, low = byte & 15, byte >> 4"),
    "zero off by one": ("u4", "(8388608.0 + LESS)", "(8388609.0 + LESS)"),
    "offset of the next block": ("u4", "w = (w - tl.load(offset + at,", "w = (w - tl.load(offset + at + 1,"),
    "scale of the next block": ("u4", "s = tl.load(scale + at, mask=there,",
                                "s = tl.load(scale + at + 1, mask=there,"),
    "scale of the next row": ("e4m3", "row.to(tl.int64) // BLOCK_ROWS * SCALES + start",
                              "(row.to(tl.int64) // BLOCK_ROWS + 1) * SCALES + start"),
    "scales behind the last": ("u4", "there = own[:, None] & (j < SCALES)[None, :]", "there = own[:, None]"),
    "sign lost": ("e2m1", "(low & 8) << 12 | ", "")}


def faults() -> None:
    """Each, put into the text of the tile, makes a product of its kind wrong."""
    from cases import packed_linear as cases

    from penstock.kernels.gemm.linear import OP, triton_packed
    from penstock.kernels.triton import tiles

    reference, text = OP.use("reference"), Path(tiles.__file__).read_text()
    with tempfile.TemporaryDirectory() as folder:
        for number, (what, (kind, there, instead)) in enumerate(FAULTS.items()):
            assert there in text, what
            file = Path(folder) / f"tiles_{number}.py"
            file.write_text(text.replace(there, instead))
            spec = importlib.util.spec_from_file_location(file.stem, file)
            assert spec is not None and spec.loader is not None
            broken = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(broken)
            for name in ("add_product", "weights_of"):
                setattr(triton_packed, name, getattr(broken, name))
            seen = 0
            for shape in cases._SHAPES:
                if shape[0] == kind:
                    weight = cases.weight_of(*shape).regular()
                    for dtype, tolerance in TOLERANCES.items():
                        x = torch.randn(5, shape[2]).to(dtype) / 64
                        got, want = triton_packed.run(x, weight, None), reference(weight, None)(x)
                        seen += not torch.allclose(got.float(), want.float(), rtol=0, atol=tolerance * float(
                            want.abs().max()))
            assert seen, what
