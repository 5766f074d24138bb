"""Weights that arrive by name, in any order, a piece at a time, and are packed when complete.

Owns names, shapes, fusion and when a source may be dropped. Knows no file format and no family.
Memory above the packed weights: the fused weights that are incomplete, normally one.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.config.base.errors import ConfigError
from penstock.kernels.fused.layer import LayerOps
from penstock.kernels.gemm.experts import ExpertOps
from penstock.kernels.gemm.linear import takes
from penstock.kernels.state.scan import Scan
from penstock.kernels.types.packed import Packed, joined
from penstock.model.base import TpGroup
from penstock.model.parts import ONE, Cut, TpRank, whole

# linear(weight_OI, bias_O or None) -> op. Called once per weight, which it may keep. op(x_TI) returns
# a new y_TO, which the model changes in place. Packed ones come only from a checkpoint asked for them.
LinearFactory: TypeAlias = Callable[[Tensor | Packed, Tensor | None], Callable[[Tensor], Tensor]]

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Slot:
    """One weight, filled row range by row range: a tensor in the model's dtype, or packed if all that came
    were, and alike."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, done: Callable[[], None]
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.done = done
        self.rows_left = shape[0]
        self.tensor: Tensor | None = None
        self.packed: dict[int, Packed] = {}         # by first row

    def fill(self, first_row: int, weight: Tensor | Packed) -> None:
        if isinstance(weight, Packed):
            self.packed[first_row] = weight
        else:
            self._copy(first_row, weight)
        self.rows_left -= weight.shape[0]
        if self.rows_left == 0:
            self.done()

    def _copy(self, first_row: int, tensor: Tensor) -> None:
        # Copy even when nothing is fused: the source may be a file mapping that is about to go.
        if self.tensor is None:
            self.tensor = torch.empty(self.shape, dtype=self.dtype, device=tensor.device)
        self.tensor[first_row : first_row + tensor.shape[0]].copy_(tensor)

    def take(self) -> Tensor | Packed:
        """The finished weight; the slot forgets it."""
        assert self.rows_left == 0
        packed, self.packed = self.packed, {}
        parts = [packed[row] for row in sorted(packed)]
        if self.tensor is None and all(part.alike(parts[0]) for part in parts):
            return joined(parts)
        return self._tensor(packed)

    def floats(self) -> Tensor:
        """Take a weight that is never packed, see `take`."""
        assert self.rows_left == 0
        packed, self.packed = self.packed, {}
        return self._tensor(packed)

    def _tensor(self, packed: dict[int, Packed]) -> Tensor:
        for row, part in packed.items():
            self._copy(row, part.floats())
        tensor, self.tensor = self.tensor, None
        assert tensor is not None
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
        bias = None if self.bias is None else _ordered(self.bias.floats(), self._order)
        weight = self.weight.take()
        self.op = self._slots.pack(weight if self._order is None else weight[self._order], bias)

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self.op(x_TI)


class Vector:
    """A small tensor that is used as it is, plus a number: a norm weight, or several stacked along rows."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, order: Tensor | None, plus: float) -> None:
        self.slot = Slot(shape, torch.float32 if plus else dtype, self._keep)
        self.value: Tensor
        self._order, self._plus, self._dtype = order, plus, dtype

    def _keep(self) -> None:
        self.value = _ordered(self.slot.floats(), self._order)
        if self._plus:
            self.value = (self.value + self._plus).to(self._dtype)


class Table:
    """Rows that are used as they are, packed if all that came were: looked up by number, or several weights
    below each other."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.slot = Slot(shape, dtype, self._keep)
        self.value: Tensor | Packed

    def _keep(self) -> None:
        self.value = self.slot.take()

    def __call__(self, ids_T: Tensor) -> Tensor:
        """Rows [T, D]."""
        if isinstance(self.value, Packed):
            return self.value[ids_T].floats().to(self.slot.dtype)
        return F.embedding(ids_T, self.value)


def _ordered(tensor: Tensor, order: Tensor | None) -> Tensor:
    """Rows `order` of it; as they came without one."""
    return tensor if order is None else tensor[order]


class Slots:
    """Every name that a model expects, with its shape and the place of its rows.

    experts     computes all experts of a layer at once; None: each is an MLP of its own
    tp_rank        what of the model's weights this is: shapes are checked whole, then cut
    scan        of layers that keep a state
    tp_group       the tensor-parallel ranks of its stage, where it has several
    """

    def __init__(self, dtype: torch.dtype, pack: LinearFactory, ops: LayerOps,
                 experts: ExpertOps | None = None, tp_rank: TpRank = ONE, scan: Scan | None = None,
                 tp_group: TpGroup | None = None) -> None:
        self.dtype = dtype
        self.pack = pack
        self.ops = ops
        self.experts = experts
        self.tp_rank = tp_rank
        self.scan, self.tp_group = scan, tp_group
        self._places: dict[str, list[tuple[Slot, int, tuple[Cut, ...]]]] = {}
        self._foreign: dict[str, tuple[int, ...]] = {}
        self._seen: set[str] = set()
        self.num_bytes = 0                  # of what has come and is kept
        self.dequantised = 0                # weights that were cut inside of their blocks
        self._bundles: dict[str, tuple[list[str], dict[tuple[int, ...], Callable[[Tensor], Tensor]]]] = {}

    def linear(
        self, prefixes: Sequence[str], rows: Sequence[int | Cut], cols: int | Cut, bias: bool, *,
        order: Tensor | None = None, adds: bool | None = None,
    ) -> Linear:
        """Fuses `prefix.weight` (and `prefix.bias`) of every prefix, in this order, of each the rows and
        columns of its cuts; output i is then row order[i] of that. A prefix may come again for other rows.
        Where columns are cut, outputs are summed over the TP ranks, and one `adds` the bias; None: the first
        does."""
        kept, columns = [_cut(n) for n in rows], _cut(cols)
        if adds is None:
            adds = isinstance(cols, int) or self.tp_rank.index == 0
        made = Linear((sum(cut.size for cut in kept), columns.size), bias and adds, self, order)
        first = 0
        for prefix, cut in zip(prefixes, kept, strict=True):
            self._place(f"{prefix}.weight", made.weight, first, (cut, columns))
            if made.bias is not None:
                self._place(f"{prefix}.bias", made.bias, first, (cut,))
            elif bias:
                self.foreign(f"{prefix}.bias", (cut.of,))
            first += cut.size
        return made

    def _place(self, name: str, slot: Slot, first_row: int, cuts: tuple[Cut, ...]) -> None:
        """This part of the weight goes there."""
        self._places.setdefault(name, []).append((slot, first_row, cuts))

    def foreign(self, name: str, shape: tuple[int, ...]) -> None:
        """A weight of this stage that another TP rank has."""
        self._foreign[name] = shape

    def stack(self, prefixes: Sequence[str], rows: int | Cut, cols: int | Cut) -> Table:
        """`prefix.weight` of every prefix, of each the rows and columns of its cuts, below each other."""
        kept, columns = _cut(rows), _cut(cols)
        made = Table((len(prefixes) * kept.size, columns.size), self.dtype)
        for i, prefix in enumerate(prefixes):
            self._place(f"{prefix}.weight", made.slot, i * kept.size, (kept, columns))
        return made

    def biases(self, prefixes: Sequence[str], rows: int | Cut) -> Vector:
        """`prefix.bias` of every prefix, of each the rows of its cut, one behind the other."""
        cut = _cut(rows)
        made = Vector((len(prefixes) * cut.size,), self.dtype, None, 0.0)
        for i, prefix in enumerate(prefixes):
            self._place(f"{prefix}.bias", made.slot, i * cut.size, (cut,))
        return made

    def vector(
        self, name: str, shape: tuple[int | Cut | Sequence[Cut], ...], *, order: Tensor | None = None,
        dtype: torch.dtype | None = None, plus: float = 0.0,
    ) -> Vector:
        """`dtype`: where it is not the model's; `plus` is added to what the file has. Cuts and `order` as of
        `linear`; of the first dimension there may be several."""
        first, *others = [size if isinstance(size, Sequence) and not isinstance(size, Cut) else [_cut(size)]
                          for size in shape]
        rest = tuple(cut for [cut] in others)
        made = Vector((sum(cut.size for cut in first), *(cut.size for cut in rest)), dtype or self.dtype, order, plus)
        row = 0
        for cut in first:
            self._place(name, made.slot, row, (cut, *rest))
            row += cut.size
        return made

    def table(self, name: str, shape: tuple[int, int]) -> Table:
        made = Table(shape, self.dtype)
        self._place(name, made.slot, 0, tuple(map(whole, shape)))
        return made

    def bundle(self, name: str, pieces: list[str], shape: tuple[int, ...],
               rows: Callable[[Tensor], Tensor] = lambda tensor: tensor.flatten(0, 1)) -> None:
        """`name` may come instead of `pieces`, whose rows `rows` makes of it: its first two axes. Called
        again for another shape that it may have."""
        self._bundles.setdefault(name, (pieces, {}))[1].setdefault(shape, rows)

    def load(self, name: str, tensor: Tensor | Packed) -> None:
        """Raises ConfigError on an unknown or repeated name, a wrong shape or a dtype not float. A bias of zeros
        that the model does not have is no error."""
        if name in self._bundles:
            pieces, forms = self._bundles[name]
            shape = tuple(tensor.shape)
            check_tensor(name, tensor, shape if shape in forms else next(iter(forms)))
            assert isinstance(tensor, Tensor)               # what is packed has two dimensions
            flat = forms[shape](tensor)
            for piece in pieces:
                num_rows = self._shape(piece)[0]
                self.load(piece, flat[:num_rows])
                flat = flat[num_rows:]
            return
        if name not in self._places and name not in self._foreign:
            if self._adds_nothing(name, tensor):
                return
            raise ConfigError(
                f"the checkpoint holds {name!r}, which a model of this config.json does not have"
            )
        check_tensor(name, tensor, self._shape(name))
        if name in self._seen:
            raise ConfigError(f"the checkpoint holds {name!r} twice")
        self._seen.add(name)
        for slot, first_row, cuts in self._places.get(name, ()):
            part = _part(tensor, cuts)
            # Integers of eight bits are a CPU's too, which reads blocks of any even number of columns.
            if isinstance(part, Packed) and (part.kind != "u8" or part.code_OI.is_cuda) and not takes(
                    part.cols, part.shape[1]):
                self.dequantised += 1
                part = part.floats()
            self.num_bytes += (part.num_bytes if isinstance(part, Packed) else
                               part.numel() * slot.dtype.itemsize)
            slot.fill(first_row, part)

    def _adds_nothing(self, name: str, tensor: Tensor | Packed) -> bool:
        """Whether it is a bias of zeros of a matrix without one: AutoGPTQ writes them."""
        weight = f"{name.removesuffix('bias')}weight"
        if not name.endswith(".bias") or (weight not in self._places and weight not in self._foreign):
            return False
        shape = self._shape(weight)
        return len(shape) == 2 and tuple(tensor.shape) == shape[:1] and isinstance(tensor, Tensor) and (
            not bool(tensor.any()))

    def wants(self, name: str) -> bool:
        """Not of what another TP rank has."""
        return name not in self._foreign

    def has(self, name: str) -> bool:
        """Whether it is a weight of this stage and TP rank."""
        return name in self._places or name in self._bundles

    def _shape(self, name: str) -> tuple[int, ...]:
        """As the checkpoint has it."""
        foreign = self._foreign.get(name)
        return tuple(cut.of for cut in self._places[name][0][2]) if foreign is None else foreign

    def cuts(self) -> Iterator[tuple[str, tuple[Cut, ...]]]:
        """What is kept here of each weight; once for each of its parts."""
        for name, places in self._places.items():
            for _, _, cuts in places:
                yield name, cuts

    def missing(self) -> list[str]:
        return [name for name in self._places if name not in self._seen]


def _cut(num: int | Cut) -> Cut:
    return whole(num) if isinstance(num, int) else num


def _part(tensor: Tensor | Packed, cuts: tuple[Cut, ...]) -> Tensor | Packed:
    """What the cuts keep of it: no copy of a tensor."""
    if all(cut.size == cut.of for cut in cuts):
        return tensor
    if isinstance(tensor, Packed):
        return tensor.part(cuts[0].range, cuts[1].range)
    return tensor[tuple(cut.range for cut in cuts)]


def check_tensor(name: str, tensor: Tensor | Packed, shape: tuple[int, ...]) -> None:
    """Raises ConfigError unless the tensor has this shape and an ordinary float dtype."""
    if tuple(tensor.shape) != shape:
        raise ConfigError(
            f"the checkpoint's {name!r} has shape {list(tensor.shape)}, "
            f"its config.json asks for {list(shape)}"
        )
    if isinstance(tensor, Tensor) and tensor.dtype not in FLOATS:
        raise ConfigError(
            f"the checkpoint's {name!r} is {str(tensor.dtype).removeprefix('torch.')}; "
            f"supported: float32, bfloat16, float16, float64"
        )
