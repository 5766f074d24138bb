"""Weights that arrive by name, in any order, a piece at a time, and are packed when complete.

Owns names, shapes, fusion and when a source may be dropped. Knows no file format and no family.
Memory above the packed weights: the fused weights that are incomplete, normally one.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from penstock.config.errors import ConfigError
from penstock.kernels.layer import LayerOps

# linear(weight_OI, bias_O or None) -> op. Called once per weight, which it may keep. op(x_TI) returns
# a new y_TO, which the model changes in place.
LinearFactory: TypeAlias = Callable[[Tensor, Tensor | None], Callable[[Tensor], Tensor]]

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Slot:
    """One tensor in the model's dtype, filled row range by row range."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, done: Callable[[], None]
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.done = done
        self.rows_left = shape[0]
        self.tensor: Tensor | None = None

    def fill(self, first_row: int, tensor: Tensor) -> None:
        # Copy even when nothing is fused: the source may be a file mapping that is about to go.
        if self.tensor is None:
            self.tensor = torch.empty(self.shape, dtype=self.dtype, device=tensor.device)
        self.tensor[first_row : first_row + tensor.shape[0]].copy_(tensor)
        self.rows_left -= tensor.shape[0]
        if self.rows_left == 0:
            self.done()

    def take(self) -> Tensor:
        """The finished tensor; the slot forgets it."""
        assert self.tensor is not None and self.rows_left == 0
        tensor, self.tensor = self.tensor, None
        return tensor


class Linear:
    """y = x W^T + b, W and b fused from the rows of several named weights. Callable once packed."""

    op: Callable[[Tensor], Tensor]

    def __init__(
        self, shape: tuple[int, int], bias: bool, slots: Slots, order: Tensor | None
    ) -> None:
        self._slots, self._order = slots, order
        self.weight = Slot(shape, slots.dtype, self._pack)
        self.bias = Slot(shape[:1], slots.dtype, self._pack) if bias else None

    def _pack(self) -> None:
        if self.weight.rows_left or (self.bias is not None and self.bias.rows_left):
            return
        bias = None if self.bias is None else _ordered(self.bias.take(), self._order)
        self.op = self._slots.pack(_ordered(self.weight.take(), self._order), bias)

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self.op(x_TI)


class Vector:
    """A small tensor that is used as it is: a norm weight, or several stacked along rows."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, order: Tensor | None) -> None:
        self.slot = Slot(shape, dtype, self._keep)
        self.value: Tensor
        self._order = order

    def _keep(self) -> None:
        self.value = _ordered(self.slot.take(), self._order)


def _ordered(tensor: Tensor, order: Tensor | None) -> Tensor:
    """Rows `order` of it; as they came without one."""
    return tensor if order is None else tensor[order]


class Slots:
    """Every name that a model expects, with its shape and the place of its rows."""

    def __init__(self, dtype: torch.dtype, pack: LinearFactory, ops: LayerOps) -> None:
        self.dtype = dtype
        self.pack = pack
        self.ops = ops
        self._places: dict[str, tuple[Slot, int, tuple[int, ...]]] = {}
        self._seen: set[str] = set()
        self._bundles: dict[str, tuple[list[str], tuple[int, ...]]] = {}

    def linear(
        self, prefixes: Sequence[str], rows: Sequence[int], cols: int, bias: bool, *,
        order: Tensor | None = None,
    ) -> Linear:
        """Fuses `prefix.weight` (and `prefix.bias`) of every prefix, in this order; output i is then
        row order[i] of that."""
        made = Linear((sum(rows), cols), bias, self, order)
        first = 0
        for prefix, num_rows in zip(prefixes, rows, strict=True):
            self._places[f"{prefix}.weight"] = (made.weight, first, (num_rows, cols))
            if made.bias is not None:
                self._places[f"{prefix}.bias"] = (made.bias, first, (num_rows,))
            first += num_rows
        return made

    def vector(
        self, name: str, shape: tuple[int, ...], *, order: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Vector:
        """`dtype`: where it is not the model's. `order` as of `linear`."""
        made = Vector(shape, dtype or self.dtype, order)
        self._places[name] = (made.slot, 0, shape)
        return made

    def bundle(self, name: str, pieces: list[str], shape: tuple[int, ...]) -> None:
        """`name` may come instead of `pieces`: its first two axes, flattened, are their rows."""
        self._bundles[name] = (pieces, shape)

    def load(self, name: str, tensor: Tensor) -> None:
        """Raises ConfigError on an unknown or repeated name, a wrong shape or a dtype not float."""
        if name in self._bundles:
            pieces, shape = self._bundles[name]
            check_tensor(name, tensor, shape)
            flat = tensor.flatten(0, 1)
            for piece in pieces:
                num_rows = self._places[piece][2][0]
                self.load(piece, flat[:num_rows])
                flat = flat[num_rows:]
            return
        if name not in self._places:
            raise ConfigError(
                f"the checkpoint holds {name!r}, which a model of this config.json does not have"
            )
        slot, first_row, shape = self._places[name]
        check_tensor(name, tensor, shape)
        if name in self._seen:
            raise ConfigError(f"the checkpoint holds {name!r} twice")
        self._seen.add(name)
        slot.fill(first_row, tensor)

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for name, (_, _, shape) in self._places.items():
            yield name, shape

    def missing(self) -> list[str]:
        return [name for name in self._places if name not in self._seen]


def check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raises ConfigError unless the tensor has this shape and an ordinary float dtype."""
    if tuple(tensor.shape) != shape:
        raise ConfigError(
            f"the checkpoint's {name!r} has shape {list(tensor.shape)}, "
            f"its config.json asks for {list(shape)}"
        )
    if tensor.dtype not in FLOATS:
        raise ConfigError(
            f"the checkpoint's {name!r} is {str(tensor.dtype).removeprefix('torch.')}; "
            f"supported: float32, bfloat16, float16, float64"
        )
