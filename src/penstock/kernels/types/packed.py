"""Packed weights as kernels read them: codes of eight bits or fewer, and factors that blocks of them share.

    O rows   I columns   R blocks of rows   J blocks of columns

Owns what such a weight means, and cutting, joining and making them. Which checkpoints hold them is `model`'s
business.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
_MOST = 448.0                   # the largest element of e4m3
_ROWS = {"cuda": 8192}    # made float at once, elsewhere 128: temporaries stay in the cache, launches on a GPU are few


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A weight of two dimensions. Blocks of `rows` x `cols` elements share a scale and an offset; those at the
    right and lower edge are smaller.

    code_OI     e4m3 or u8, dense
    scale_RJ    f32, dense
    offset_RJ   integers: an element is (code - offset) * scale; f32: code * scale + offset; None: code * scale
    """

    code_OI: Tensor
    scale_RJ: Tensor
    rows: int
    cols: int
    offset_RJ: Tensor | None = None

    def __post_init__(self) -> None:
        outputs, inputs = self.code_OI.shape
        assert self.scale_RJ.shape == (-(-outputs // self.rows), -(-inputs // self.cols)), (
            f"scales {tuple(self.scale_RJ.shape)} of {(outputs, inputs)} in {self.rows} x {self.cols}")
        assert self.code_OI.dtype in (E4M3, torch.uint8) and self.scale_RJ.dtype == torch.float32
        assert self.offset_RJ is None or self.offset_RJ.shape == self.scale_RJ.shape

    @property
    def kind(self) -> Literal["e4m3", "u8"]:
        return "e4m3" if self.code_OI.dtype == E4M3 else "u8"

    @property
    def shape(self) -> torch.Size:
        return self.code_OI.shape

    @property
    def num_bytes(self) -> int:
        """What kernels keep of it: codes of u8 in four bits if all fit, their scales and offsets as f16."""
        bits = 4 if self.kind == "u8" and bool((self.code_OI < 16).all()) else 8
        return self.code_OI.numel() * bits // 8 + self.scale_RJ.nbytes

    def to(self, device: str | torch.device) -> Packed:
        return self._with(self.code_OI.to(device), self.rows, self.cols, lambda part_RJ: part_RJ.to(device))

    def __getitem__(self, rows: Tensor | slice) -> Packed:
        """Some rows of it, in the order of `rows`; each has scales of its own then."""
        return self.finer(1, self.cols)._with(_bytes(self.code_OI)[rows].view(self.code_OI.dtype), 1, self.cols,
                                              lambda part_RJ: part_RJ[rows])

    def part(self, rows: slice, columns: slice) -> Packed:
        """Some rows and columns of it; in smaller blocks where these begin in one."""
        up, left = math.gcd(self.rows, rows.start), math.gcd(self.cols, columns.start)
        above, beside = (slice(s.start // n, -(-s.stop // n)) for s, n in ((rows, up), (columns, left)))
        code_OI = _bytes(self.code_OI)[rows, columns].contiguous().view(self.code_OI.dtype)
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
                      None if self.offset_RJ is None else change(self.offset_RJ))

    def floats(self) -> Tensor:
        """float32 [O, I]: what it means."""
        out_OI = torch.empty(self.shape, dtype=torch.float32, device=self.code_OI.device)
        step = max(1, _ROWS.get(out_OI.device.type, 128) // self.rows) * self.rows
        for first in range(0, self.shape[0], step):
            part = out_OI[first : first + step]
            part.copy_(self.code_OI[first : first + step])
            blocks = slice(first // self.rows, (first + step) // self.rows)
            scale = self._spread(self.scale_RJ[blocks], len(part))
            offset = None if self.offset_RJ is None else self._spread(self.offset_RJ[blocks], len(part))
            if offset is not None and not offset.is_floating_point():
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
        """Whether no code is NaN, which e4m3 has beside finite numbers, and factors keep their value. Those of u8 are
        kept as f16: none may change by more than 1/1024 of the largest, as tiny ones and those above 65,504 do."""
        if self.kind == "e4m3":
            odd = (_bytes(self.code_OI) & 127) == 127
            return not bool(odd.any()) and bool(self.scale_RJ.isfinite().all())
        return all(bool(((part.half().float() - part).abs() <= part.abs().max() / 1024).all())
                   for part in (self.scale_RJ, self.offset_RJ) if part is not None and part.numel())

    def equals(self, other: Packed) -> bool:
        """Whether it is stored alike, to the last bit."""
        return self.alike(other) and all(a is None or (b is not None and torch.equal(a, b)) for a, b in (
            (_bytes(self.code_OI), _bytes(other.code_OI)), (self.scale_RJ, other.scale_RJ),
            (self.offset_RJ, other.offset_RJ)))

    def alike(self, other: Packed) -> bool:
        """Whether rows of both can be one weight."""
        mine, theirs = ((part.kind, None if part.offset_RJ is None else part.offset_RJ.is_floating_point())
                        for part in (self, other))
        return mine == theirs


def _bytes(code_OI: Tensor) -> Tensor:
    """The codes as u8: torch indexes and compares them."""
    return code_OI.view(torch.uint8)


def joined(parts: Sequence[Packed]) -> Packed:
    """Rows of all of them, which are alike, one after the other, in blocks that fit into each one's."""
    cols = math.gcd(*(part.cols for part in parts))
    rows = math.gcd(*(part.rows for part in parts), *(part.shape[0] for part in parts[:-1]))
    finer = [part.finer(rows, cols) for part in parts]
    offsets = [part.offset_RJ for part in finer if part.offset_RJ is not None]
    return Packed(torch.cat([_bytes(part.code_OI) for part in parts]).view(parts[0].code_OI.dtype),
                  torch.cat([part.scale_RJ for part in finer]), rows, cols, torch.cat(offsets) if offsets else None)


def quantised(weight_OI: Tensor, rows: int, cols: int) -> Packed:
    """The nearest in e4m3, with the largest element of each block as large as that goes. float32."""
    outputs, inputs = weight_OI.shape
    up, left = -(-outputs // rows), -(-inputs // cols)
    padded = torch.nn.functional.pad(weight_OI, (0, left * cols - inputs, 0, up * rows - outputs))
    blocks = padded.view(up, rows, left, cols)
    scale_RJ = (blocks.abs().amax((1, 3)) / _MOST).clamp_min_(1e-12)
    codes = (blocks / scale_RJ[:, None, :, None]).view(up * rows, left * cols)[:outputs, :inputs]
    return Packed(codes.contiguous().to(E4M3), scale_RJ, rows, cols)
