"""Block-scaled fp8 weights as kernels read them: e4m3 elements, and a factor for each block of them.

    O rows   I columns   R blocks of rows   J blocks of columns

Owns what such a weight means, and joining and making them. Which checkpoints hold them is `model`'s business.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
_MOST = 448.0                   # the largest element
_ROWS = 128                     # made float at once: temporaries stay small


@dataclass(frozen=True, slots=True, eq=False)
class Scaled:
    """A weight of two dimensions: element [o, i] times scale [o // rows, i // cols].

    element_OI   e4m3, dense      scale_RJ   f32, dense; blocks at the right and lower edge are smaller
    """

    element_OI: Tensor
    scale_RJ: Tensor
    rows: int
    cols: int

    def __post_init__(self) -> None:
        outputs, inputs = self.element_OI.shape
        assert self.scale_RJ.shape == (-(-outputs // self.rows), -(-inputs // self.cols)), (
            f"scales {tuple(self.scale_RJ.shape)} of {(outputs, inputs)} in {self.rows} x {self.cols}")
        assert self.element_OI.dtype == E4M3 and self.scale_RJ.dtype == torch.float32

    @property
    def shape(self) -> torch.Size:
        return self.element_OI.shape

    @property
    def num_bytes(self) -> int:
        return self.element_OI.nbytes + self.scale_RJ.nbytes

    def to(self, device: str | torch.device) -> Scaled:
        return Scaled(self.element_OI.to(device), self.scale_RJ.to(device), self.rows, self.cols)

    def __getitem__(self, rows: Tensor | slice) -> Scaled:
        """Some rows of it, in the order of `rows`; each has scales of its own then."""
        return Scaled(self.element_OI.view(torch.uint8)[rows].view(E4M3), self.finer(1).scale_RJ[rows], 1,
                      self.cols)

    def part(self, rows: slice, columns: slice) -> Scaled:
        """Some rows and columns of it; in smaller blocks where these begin in one."""
        up, left = math.gcd(self.rows, rows.start), math.gcd(self.cols, columns.start)
        scale_RJ = self.finer(up).scale_RJ.repeat_interleave(self.cols // left, 1)
        return Scaled(self.element_OI.view(torch.uint8)[rows, columns].contiguous().view(E4M3),
                      scale_RJ[rows.start // up:-(-rows.stop // up),
                               columns.start // left:-(-columns.stop // left)].contiguous(), up, left)

    def finer(self, rows: int) -> Scaled:
        """The same in blocks of fewer rows; `rows` divides theirs."""
        assert self.rows % rows == 0, f"blocks of {self.rows} rows cut into {rows}"
        scale_RJ = self.scale_RJ.repeat_interleave(self.rows // rows, 0)[:-(-self.shape[0] // rows)]
        return Scaled(self.element_OI, scale_RJ, rows, self.cols)

    def floats(self) -> Tensor:
        """float32 [O, I]: what it means."""
        outputs, inputs = self.shape
        out_OI = torch.empty(self.shape, dtype=torch.float32, device=self.element_OI.device)
        step = max(1, _ROWS // self.rows) * self.rows
        for first in range(0, outputs, step):
            part = out_OI[first : first + step]
            part.copy_(self.element_OI[first : first + step])
            scale_RJ = self.scale_RJ[first // self.rows : (first + step) // self.rows]
            if self.rows < step:
                scale_RJ = scale_RJ.repeat_interleave(self.rows, 0)[: len(part)]
            part *= scale_RJ.repeat_interleave(self.cols, 1)[:, :inputs]
        return out_OI

    def finite(self) -> bool:
        """Whether no element is NaN, which e4m3 has beside finite numbers, and all scales are finite."""
        odd = (self.element_OI.view(torch.uint8) & 127) == 127
        return not bool(odd.any()) and bool(self.scale_RJ.isfinite().all())


def joined(parts: Sequence[Scaled]) -> Scaled:
    """Rows of all of them, one after the other, in blocks of rows that fit into each."""
    [cols] = {part.cols for part in parts}
    rows = math.gcd(*(part.rows for part in parts), *(part.shape[0] for part in parts[:-1]))
    return Scaled(torch.cat([part.element_OI.view(torch.uint8) for part in parts]).view(E4M3),
                  torch.cat([part.finer(rows).scale_RJ for part in parts]), rows, cols)


def quantised(weight_OI: Tensor, rows: int, cols: int) -> Scaled:
    """The nearest, with the largest element of each block as large as e4m3 goes. float32."""
    outputs, inputs = weight_OI.shape
    up, left = -(-outputs // rows), -(-inputs // cols)
    padded = torch.nn.functional.pad(weight_OI, (0, left * cols - inputs, 0, up * rows - outputs))
    blocks = padded.view(up, rows, left, cols)
    scale_RJ = (blocks.abs().amax((1, 3)) / _MOST).clamp_min_(1e-12)
    elements = (blocks / scale_RJ[:, None, :, None]).view(up * rows, left * cols)[:outputs, :inputs]
    return Scaled(elements.contiguous().to(E4M3), scale_RJ, rows, cols)
