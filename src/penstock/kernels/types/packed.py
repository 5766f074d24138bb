"""Packed weights as kernels read them: codes of eight bits or fewer, and factors that blocks of them share.

    O rows   I columns   R blocks of rows   J blocks of columns

Owns what such a weight means, and cutting, joining and making them. Which checkpoints hold them is `model`'s
business.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

Kind: TypeAlias = Literal["e4m3", "e2m1", "u4", "u8"]
E4M3 = torch.float8_e4m3fn
KINDS: tuple[Kind, ...] = ("e4m3", "e2m1", "u4", "u8")
ZERO = {"e4m3": 0, "e2m1": 0, "u4": 8, "u8": 128}       # the code that means 0, without offsets
# Twice what e2m1 means, counted from the least; the code of each of its sixteen.
LEAST = 12
E2M1 = tuple(LEAST + value for value in (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12))
_MOST = 448.0                   # the largest element of e4m3
_SMALL = 64                     # columns of a block of which scales of 16 bits are read two at once, at least
_ROWS = {"cuda": 8192}    # made float at once, elsewhere 128: temporaries stay in the cache, launches on a GPU are few


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A weight of two dimensions. Blocks of `rows` x `cols` elements share a scale and an offset; those at the
    right and lower edge are smaller.

    code_OI     e4m3 or u8, dense; of four bits [O, I / 2] bytes, the even column in the low half
    scale_RJ    f32, bf16 or f16, dense
    offset_RJ   integers: an element is (code - offset) * scale; f32 or f16: code * scale + offset; None: the first with
                `ZERO` of its kind
    four        what codes of four bits are: integers, or floats of which the lowest bit is the fraction's
    """

    code_OI: Tensor
    scale_RJ: Tensor
    rows: int
    cols: int
    offset_RJ: Tensor | None = None
    four: Literal["e2m1", "u4"] | None = None

    def __post_init__(self) -> None:
        outputs, inputs = self.shape
        assert self.scale_RJ.shape == (-(-outputs // self.rows), -(-inputs // self.cols)), (
            f"scales {tuple(self.scale_RJ.shape)} of {(outputs, inputs)} in {self.rows} x {self.cols}")
        assert self.code_OI.dtype in ((torch.uint8,) if self.four else (E4M3, torch.uint8))
        assert self.scale_RJ.dtype in (torch.float32, torch.bfloat16, torch.float16)
        assert self.offset_RJ is None or self.offset_RJ.shape == self.scale_RJ.shape

    @property
    def kind(self) -> Kind:
        return self.four or ("e4m3" if self.code_OI.dtype == E4M3 else "u8")

    @property
    def shape(self) -> torch.Size:
        outputs, stored = self.code_OI.shape
        return torch.Size((outputs, 2 * stored if self.four else stored))

    @property
    def num_bytes(self) -> int:
        """What kernels keep of it: of u8 as on a CPU, codes in four bits if all fit, scales and offsets as f16."""
        if self.kind == "u8" and self.code_OI.device.type == "cpu":
            return self.code_OI.numel() // (2 if bool((self.code_OI < 16).all()) else 1) + 4 * self.scale_RJ.numel()
        return self.code_OI.nbytes + self.scale_RJ.nbytes + (0 if self.offset_RJ is None else self.offset_RJ.nbytes)

    def to(self, device: str | torch.device) -> Packed:
        return self._with(self.code_OI.to(device), self.rows, self.cols, lambda part_RJ: part_RJ.to(device))

    def __getitem__(self, rows: Tensor | slice) -> Packed:
        """Some rows of it, in the order of `rows`; each has scales of its own then."""
        return self.finer(1, self.cols)._with(_bytes(self.code_OI)[rows].view(self.code_OI.dtype), 1, self.cols,
                                              lambda part_RJ: part_RJ[rows])

    def part(self, rows: slice, columns: slice) -> Packed:
        """Some rows and columns of it; in smaller blocks where these begin in one."""
        if self.four and (columns.start % 2 or columns.stop % 2):
            return self.wide().part(rows, columns)
        # A block as wide as the weight is as wide as any part of it.
        up = math.gcd(self.rows, rows.start)
        left = self.cols if self.cols >= self.shape[1] else math.gcd(self.cols, columns.start)
        above = slice(rows.start // up, -(-rows.stop // up))
        beside = slice(columns.start // left, -(-columns.stop // left))
        stored = slice(columns.start // 2, columns.stop // 2) if self.four else columns
        code_OI = _bytes(self.code_OI)[rows, stored].contiguous().view(self.code_OI.dtype)
        return self.finer(up, left)._with(code_OI, up, left, lambda part_RJ: part_RJ[above, beside].contiguous())

    def finer(self, rows: int, cols: int) -> Packed:
        """The same in smaller blocks; `rows` and `cols` divide theirs."""
        if (rows, cols) == (self.rows, self.cols):
            return self
        assert self.rows % rows == 0 == self.cols % cols, f"{self.rows} x {self.cols} cut into {rows} x {cols}"
        up, left = -(-self.shape[0] // rows), -(-self.shape[1] // cols)
        return self._with(self.code_OI, rows, cols, lambda part_RJ: part_RJ.repeat_interleave(self.rows // rows, 0)[
            :up].repeat_interleave(self.cols // cols, 1)[:, :left].contiguous())

    def _with(self, code_OI: Tensor, rows: int, cols: int, change: Callable[[Tensor], Tensor]) -> Packed:
        """Other codes, of which scales and offsets change alike."""
        return Packed(code_OI, change(self.scale_RJ), rows, cols,
                      None if self.offset_RJ is None else change(self.offset_RJ), self.four)

    def wide(self) -> Packed:
        """The same with a code of integers in a byte of its own; in floats of eight bits as it is."""
        if not self.four:
            return self
        code_OI = torch.stack((self.code_OI & 15, self.code_OI >> 4), -1).flatten(1)
        scale_RJ, offset_RJ, zero = self.scale_RJ, self.offset_RJ, ZERO[self.kind]
        if self.four == "e2m1":
            code_OI = torch.tensor(E2M1, dtype=torch.uint8, device=code_OI.device)[code_OI.int()]
            scale_RJ, zero = scale_RJ.float() / 2, LEAST
        if offset_RJ is None:
            offset_RJ = torch.full_like(scale_RJ, zero, dtype=torch.int16)
        return Packed(code_OI, scale_RJ, self.rows, self.cols, offset_RJ)

    def regular(self) -> Packed:
        """The same in blocks as a GPU's kernels read them: a power of two of columns, or all. So many or a multiple of
        16 must be what they have."""
        if self.scale_RJ.shape[1] == 1:
            return self
        return self.finer(self.rows, self.cols & -self.cols)

    def compact(self) -> Packed:
        """It as kernels of a GPU read it: codes of integers in four bits if all fit, no offsets that are `ZERO`, and
        scales of small blocks in 16 bits if that loses nothing. With shifts both are f16, as on a CPU. Other factors
        have 32 bits: loads of fewer are not made ahead."""
        code_OI, four, offset_RJ, scale_RJ = self.code_OI, self.four, self.offset_RJ, self.scale_RJ
        if self.kind == "u8" and offset_RJ is None:
            offset_RJ = torch.full_like(scale_RJ, ZERO["u8"], dtype=torch.int16)
        if self.kind == "u8" and self.shape[1] % 2 == 0 and bool((code_OI < 16).all()) and (
                offset_RJ is None or offset_RJ.is_floating_point() or bool((offset_RJ <= ZERO["u8"]).all())):
            code_OI, four = code_OI[:, ::2] | code_OI[:, 1::2] << 4, "u4"
        zero = ZERO[four or self.kind]
        if offset_RJ is not None and offset_RJ.is_floating_point():
            scale_RJ, offset_RJ = (part.half() for part in self.rounded(15 if four else 255))
        elif offset_RJ is not None and bool((offset_RJ == zero).all()):
            offset_RJ = None
        elif offset_RJ is not None and self.cols > _SMALL:
            offset_RJ = offset_RJ.int()
        if self.cols <= _SMALL and scale_RJ.dtype == torch.float32:
            for dtype in (torch.float16, torch.bfloat16):
                if scale_RJ.to(dtype).float().equal(scale_RJ.float()):
                    scale_RJ = scale_RJ.to(dtype)
                    break
        return Packed(code_OI.contiguous(), scale_RJ, self.rows, self.cols, offset_RJ, four).regular()

    def rounded(self, most: int) -> tuple[Tensor, Tensor]:
        """Scales rounded to f16, and shifts that make up for it at the code, of 0 to `most`, that is nearest to a
        weight of zero: what is left is relative to the weight, not to the shift. float32."""
        scale_RJ, shift_RJ = self.scale_RJ.float(), self.offset_RJ
        if shift_RJ is None or not shift_RJ.is_floating_point():
            shift_RJ = scale_RJ * (-ZERO[self.kind] if shift_RJ is None else -shift_RJ)
        kept_RJ = scale_RJ.half().float()
        zero_RJ = (-shift_RJ / scale_RJ).nan_to_num().clamp(0, most)
        return kept_RJ, shift_RJ + zero_RJ * (scale_RJ - kept_RJ)

    def floats(self) -> Tensor:
        """float32 [O, I]: what it means."""
        if self.four:
            return self.wide().floats()
        out_OI = torch.empty(self.shape, dtype=torch.float32, device=self.code_OI.device)
        step = max(1, _ROWS.get(out_OI.device.type, 128) // self.rows) * self.rows
        for first in range(0, self.shape[0], step):
            part = out_OI[first : first + step]
            part.copy_(self.code_OI[first : first + step])
            blocks = slice(first // self.rows, (first + step) // self.rows)
            scale = self._spread(self.scale_RJ[blocks], len(part))
            offset = None if self.offset_RJ is None else self._spread(self.offset_RJ[blocks], len(part))
            if offset is None:
                part -= ZERO[self.kind]
            elif not offset.is_floating_point():
                part -= offset
            part *= scale
            if offset is not None and offset.is_floating_point():
                part += offset
        return out_OI

    def _spread(self, part_RJ: Tensor, rows: int) -> Tensor:
        """[rows or 1, I or 1]: to each element what its block has."""
        if len(part_RJ) > 1:
            part_RJ = part_RJ.repeat_interleave(self.rows, 0)[:rows]
        return part_RJ.repeat_interleave(self.cols, 1)[:, :self.shape[1]] if part_RJ.shape[1] > 1 else part_RJ

    def finite(self) -> bool:
        """Whether no code is NaN, which e4m3 has beside finite numbers, and factors keep their value. On a CPU those of
        u8 are kept as f16: none may change by more than 1/1024 of the largest, as tiny ones and those above 65,504
        do."""
        if self.kind != "u8" or self.code_OI.device.type != "cpu":
            odd = self.kind == "e4m3" and bool(((_bytes(self.code_OI) & 127) == 127).any())
            return not odd and all(part is None or bool(part.isfinite().all())
                                   for part in (self.scale_RJ, self.offset_RJ))
        return all(bool(((part.half().float() - part).abs() <= part.abs().max() / 1024).all())
                   for part in (self.scale_RJ, self.offset_RJ) if part is not None and part.numel())

    def equals(self, other: Packed) -> bool:
        """Whether it is stored alike, to the last bit."""
        return self.alike(other) and all(a is None or (b is not None and torch.equal(a, b)) for a, b in (
            (_bytes(self.code_OI), _bytes(other.code_OI)), (self.scale_RJ, other.scale_RJ),
            (self.offset_RJ, other.offset_RJ)))

    def alike(self, other: Packed) -> bool:
        """Whether rows of both can be one weight: as `joined` widens codes of four bits and adds offsets, of floats
        only where both have such."""
        floats = [part.kind in ("e4m3", "e2m1") and part.kind for part in (self, other)]
        added = [part.offset_RJ is not None and part.offset_RJ.is_floating_point() for part in (self, other)]
        near = self.cols == other.cols or math.gcd(self.cols, other.cols) % 16 == 0     # as kernels read them
        return floats[0] == floats[1] and added[0] == added[1] and near


def _bytes(code_OI: Tensor) -> Tensor:
    """The codes as u8: torch indexes and compares them."""
    return code_OI.view(torch.uint8)


def joined(parts: Sequence[Packed]) -> Packed:
    """Rows of all of them, which are alike, one after the other, in blocks that fit into each one's."""
    if len({part.kind for part in parts}) > 1:
        parts = [part.wide() for part in parts]
    cols = math.gcd(*(part.cols for part in parts))
    rows = math.gcd(*(part.rows for part in parts), *(part.shape[0] for part in parts[:-1]))
    finer = [part.finer(rows, cols) for part in parts]
    offset_RJ = None
    if any(part.offset_RJ is not None for part in parts):
        offset_RJ = torch.cat([torch.full_like(part.scale_RJ, ZERO[part.kind], dtype=torch.int16)
                               if part.offset_RJ is None else part.offset_RJ for part in finer])
    return Packed(torch.cat([_bytes(part.code_OI) for part in parts]).view(parts[0].code_OI.dtype),
                  torch.cat([part.scale_RJ for part in finer]), rows, cols, offset_RJ, parts[0].four)


def quantised(weight_OI: Tensor, rows: int, cols: int, kind: Kind = "e4m3") -> Packed:
    """The nearest in codes of this kind, with the largest element of each block as large as these go, and no
    offsets. float32; of four bits an even number of columns."""
    outputs, inputs = weight_OI.shape
    up, left = -(-outputs // rows), -(-inputs // cols)
    padded = torch.nn.functional.pad(weight_OI, (0, left * cols - inputs, 0, up * rows - outputs))
    blocks = padded.view(up, rows, left, cols)
    most = {"e4m3": _MOST, "e2m1": 6.0, "u4": 7.0, "u8": 127.0}[kind]
    scale_RJ = (blocks.abs().amax((1, 3)) / most).clamp_min_(1e-12)
    codes = (blocks / scale_RJ[:, None, :, None]).view(up * rows, left * cols)[:outputs, :inputs]
    if kind == "e4m3":
        return Packed(codes.contiguous().to(E4M3), scale_RJ, rows, cols)
    if kind == "e2m1":
        means = torch.tensor(E2M1[:8], device=codes.device) - LEAST
        code_OI = torch.bucketize(codes.abs() * 2, (means[1:] + means[:-1]) / 2).byte() | (codes < 0).byte() << 3
    else:
        code_OI = (codes.round() + ZERO[kind]).byte()
    four = None if kind == "u8" else kind
    return Packed(code_OI[:, ::2] | code_OI[:, 1::2] << 4 if four else code_OI.contiguous(), scale_RJ, rows, cols,
                  four=four)
