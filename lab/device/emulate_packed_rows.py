"""packed_rows.cu on a CPU: each thread of a block is a thread here, shuffles and matrix products wait for a warp.

    PYTHONPATH=src python lab/device/emulate_packed_rows.py

Prints the largest relative error of dense products and of experts, for kinds, blocks, gates and numbers of rows. Ends
where a byte of x, codes, scales or zero points is read that is none, or not at a multiple of what is read at once.
"""
from __future__ import annotations

import ctypes
import hashlib
import re
import struct
import subprocess
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.types.packed import E4M3, Packed

ROOT = Path(__file__).parents[2]
KINDS = ("e4m3", "u4", "e2m1", "u8")
SCALES = (torch.float32, torch.float16, torch.bfloat16)
INSTEAD = {      # of functions that are assembly
    "codes_of": "uint4 v; inside(at, 16); memcpy(&v, at, 16); return v;",
    "word_at": "word v; inside(at, 4); memcpy(&v, at, 4); return v;",
    "half_at": "half v; inside(at, 2); memcpy(&v, at, 2); return v;",
    "input": "uint4 v; inside(at, 16); memcpy(&v, at, 16); return v;",
    "lifted": "return pk(bf(x) * 0x1p60f, bf(x >> 16) * 0x1p60f);",
    "less": "return pk(bf(x) - bf(y), bf(x >> 16) - bf(y >> 16));",
    "from_half": "_Float16 h; memcpy(&h, &x, 2); return (float)h;",
    "rounded": "return rn(x);",
    "add": "mma(sum, a0, a1, a2, a3, b0, b1);"}
AROUND = Path(__file__).with_name("emulated_cuda.cpp").read_text()


def source() -> str:
    text = (ROOT / "src/penstock/kernels/gemm/linear/packed_rows.cu").read_text()
    for name, body in INSTEAD.items():
        head = r"(__device__ __forceinline__ \w+ " + name + r"\([^)]*\) )\{.*?\n\}"
        text, found = re.subn(head, lambda m, body=body: m[1] + "{ " + body + " }", text, flags=re.DOTALL)
        assert found == 1, name
    return re.sub(r'asm volatile\("griddep[^;]*;"[^;]*;', "", text)


def built(**defines: int) -> ctypes.CDLL:
    text = "".join(f"#define {k} {v}\n" for k, v in defines.items()) + AROUND.replace("//KERNEL//", source())
    at = Path(tempfile.gettempdir()) / f"emulated-{hashlib.md5(text.encode()).hexdigest()[:12]}"
    if not at.with_suffix(".so").exists():
        at.with_suffix(".cpp").write_text(text)
        subprocess.run(["g++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-pthread", at.with_suffix(".cpp"), "-o",
                        at.with_suffix(".so")], check=True)
    return ctypes.CDLL(str(at.with_suffix(".so")))


def weight_of(kind: str, outputs: int, inputs: int, rows: int, cols: int, zeros: bool) -> Packed:
    four = kind if kind in ("u4", "e2m1") else None
    shape = -(-outputs // rows), -(-inputs // cols)
    code = (torch.randn(outputs, inputs).mul_(60).clamp_(-448, 448).to(E4M3) if kind == "e4m3" else
            torch.randint(0, 256, (outputs, inputs // 2 if four else inputs), dtype=torch.uint8))
    scale = torch.rand(*shape).add_(0.01)
    if cols <= 64 and kind != "e4m3":
        scale = scale.to(torch.bfloat16 if kind == "e2m1" else torch.float16)
    return Packed(code, scale, rows, cols, torch.randint(0, 17, shape).short() if zeros else None, four)


def kernel(weight: Packed, tiles: int, gate: int) -> tuple[ctypes.CDLL, list[int]]:
    chunk = 128 if weight.four else 64
    small = weight.cols if weight.cols < min(chunk, weight.shape[1]) else 0
    shift = (weight.cols // chunk).bit_length() - 1 if weight.scale_RJ.shape[1] > 1 and not small else 30
    zeros = 0 if weight.offset_RJ is None else weight.offset_RJ.element_size() * 8
    return built(WARPS=2, AHEAD=2, TILES=tiles, KIND=KINDS.index(weight.kind), ZEROS=zeros, SMALL=small, GATE=gate,
                 SCALE=SCALES.index(weight.scale_RJ.dtype), HALF=int(weight.shape[1] % chunk > 0)), [
                     weight.rows, shift, weight.scale_RJ.shape[1]]


def at(part: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(0 if part is None else part.data_ptr())


def parts(weight: Packed) -> tuple[ctypes.c_void_p, ...]:
    return at(weight.code_OI), at(weight.scale_RJ), at(weight.offset_RJ)


def may_read(library: ctypes.CDLL, weight: Packed, x: Tensor) -> None:
    """These rows of x and this weight, nothing else."""
    library.forget()
    for part in (*x, weight.code_OI, weight.scale_RJ, weight.offset_RJ):
        if part is not None:
            library.may_read(at(part), ctypes.c_longlong(part.nbytes))


def error(out: Tensor, want: Tensor) -> float:
    return ((out.float() - want).abs() / (want.abs() + want.abs().mean())).max().item()


def dense(kind: str, outputs: int, inputs: int, rows: int, cols: int, tokens: int, *, zeros: bool = False) -> None:
    weight = weight_of(kind, outputs, inputs, rows, cols, zeros)
    library, numbers = kernel(weight, -(-tokens // 8), 0)
    x = torch.randn(tokens, inputs + 24).bfloat16()[:, 8:8 + inputs]
    may_read(library, weight, x)
    bias, out = torch.randn(outputs).bfloat16(), torch.zeros(tokens, outputs, dtype=torch.bfloat16)
    library.run(2, at(x), *parts(weight), at(bias), at(out),
                (ctypes.c_longlong * 7)(tokens, outputs, inputs, x.stride(0), *numbers))
    print("dense", kind, outputs, inputs, rows, cols, tokens, f"{error(out, x.float() @ weight.floats().T + bias):.4f}")


def gated(gate: int, up_TJ: Tensor) -> Tensor:
    if gate == 4:
        return up_TJ.relu() ** 2
    g, u = up_TJ.chunk(2, -1)
    if gate == 3:
        g, u = g.clamp(max=7), u.clamp(-7, 7) + 1
        return g * torch.sigmoid(1.7 * g) * u
    return (F.gelu(g, approximate="tanh") if gate == 2 else F.silu(g)) * u


def experts(kind: str, num: int, chosen: int, dim: int, width: int, rows: int, cols: int, gate: int, *,
            first: int = 0, here: int = 0, biased: bool = True) -> None:
    here, wide = here or num, width * (1 if gate == 4 else 2)
    into = weight_of(kind, here * wide, dim, rows, cols, False)
    down = weight_of(kind, here * dim, width, rows, cols, False)
    expert, weigh, x = torch.randperm(num)[:chosen], torch.rand(chosen), (torch.randn(dim) * 0.05).bfloat16()
    biases = [torch.randn(here * n).bfloat16() if biased else None for n in (wide, dim)]
    inner, out = (torch.zeros(chosen, n, dtype=torch.bfloat16) for n in (width, dim))
    for weight, outputs, given, made, bias, what in ((into, wide, x, inner, biases[0], gate),
                                                     (down, dim, inner, out, biases[1], 5)):
        library, numbers = kernel(weight, 1, what)
        may_read(library, weight, given.view(-1, weight.shape[1]))
        floats = struct.unpack("2I", struct.pack("2f", 1.7, 7.0))
        library.run2(2, chosen, at(given), *parts(weight), at(bias), at(made), at(expert), at(weigh),
                     (ctypes.c_longlong * 9)(outputs, weight.shape[1], *numbers, first, here, *floats))
    worst, up_OI, down_OI = 0.0, into.floats(), down.floats()
    for at_visit, e in enumerate((expert - first).tolist()):
        if not 0 <= e < here:
            assert not out[at_visit].any()
            continue
        at_e = slice(e * wide, (e + 1) * wide), slice(e * dim, (e + 1) * dim)
        up = up_OI[at_e[0]] @ x.float() + (0 if biases[0] is None else biases[0][at_e[0]])
        want = (down_OI[at_e[1]] @ inner[at_visit].float()
                + (0 if biases[1] is None else biases[1][at_e[1]])) * weigh[at_visit]
        worst = max(worst, error(inner[at_visit], gated(gate, up)), error(out[at_visit], want))
    print("experts", kind, num, chosen, dim, width, rows, cols, "gate", gate, f"{worst:.4f}")


if __name__ == "__main__":
    dense("e4m3", 37, 256, 128, 128, 3)
    dense("e4m3", 40, 320, 1, 64, 9)
    dense("u4", 37, 256, 1, 128, 3, zeros=True)
    dense("u4", 40, 512, 1, 32, 9)
    dense("u4", 33, 384, 1, 64, 16, zeros=True)
    dense("u4", 20, 256, 1, 16, 2, zeros=True)
    dense("e2m1", 37, 256, 1, 16, 5)
    dense("e2m1", 33, 384, 1, 32, 12)
    dense("u8", 50, 256, 1, 128, 4)
    # Rows that end with half a chunk of four bits.
    dense("e2m1", 33, 2880, 1, 32, 3)
    dense("e2m1", 20, 192, 1, 16, 9)
    dense("e2m1", 20, 320, 1, 64, 2)
    dense("e2m1", 37, 320, 20, 320, 3)
    dense("u4", 37, 320, 1, 128, 5)
    dense("u4", 37, 448, 1, 256, 9, zeros=True)
    dense("u4", 40, 192, 1, 32, 12, zeros=True)
    dense("u4", 20, 64, 1, 64, 2)
    experts("e4m3", 4, 2, 128, 64, 64, 64, 1)
    experts("e4m3", 4, 3, 128, 64, 64, 64, 3)
    experts("u4", 5, 4, 128, 128, 1, 32, 2, first=1, here=2, biased=False)
    experts("e2m1", 3, 2, 128, 128, 1, 16, 4)
    experts("u8", 3, 2, 128, 64, 1, 64, 1)
    experts("e2m1", 3, 3, 320, 192, 1, 32, 3)
    experts("u4", 3, 3, 320, 192, 1, 128, 3)
    experts("u4", 3, 3, 192, 64, 1, 32, 1)
