"""What a reader of a quantised format provides, and what several of them check.

Readers are chosen before torch is imported: their arithmetic is in `formats.values`.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Literal, Protocol

from penstock.config.base.errors import ConfigError, show
from penstock.model.weights.safetensors_file import StoredTensor

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.kernels.types.packed import Packed

FLOATS = ("F16", "BF16", "F32")         # types of scales


@dataclass(frozen=True, slots=True)
class Format:
    """How a weight is packed: codes of `bits` bits, of which `rows` x `cols` share what takes four bytes. Integers of
    four bits are of kind u8 in files, and u4 where a GPU keeps them."""

    kind: Literal["e4m3", "e2m1", "u8"]
    rows: int
    cols: int
    bits: int = 8

    def scales(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Shape of the scales of a weight of this shape: blocks at the right and lower edge are smaller."""
        return -(-shape[0] // self.rows), -(-shape[1] // self.cols)

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """What a weight of this shape takes: at most, as few bits may do."""
        # In large blocks scales and offsets of integers have four bytes each, see `Packed.compact`.
        each = 8 if self.kind == "u8" and self.cols > 64 else 4
        return prod(shape) * self.bits // 8 + each * prod(self.scales(shape))


class WeightReader(Protocol):
    """One format: which tensors store a weight, and what they mean.

    label     the format's name in the log
    between   what a tensor's name has between its module and its part
    beside    parts that store a weight
    stacked   the first axis of each part is the expert
    kind      in which weights may stay packed; None: they become floats
    format    of all quantised weights, where the config says it; of integers those that are random have it
    """

    label: str
    beside: frozenset[str]
    between: str = "."
    stacked: bool = False
    kind: Literal["e4m3", "u8"] | None = None
    format: Format | None = None

    def names(self, module: str) -> tuple[str, ...]:
        """Return the weights that a module's tensors store, whose rows are in turns in what `read` returns; of
        stacked ones `{}` is the expert."""
        return (f"{module}.weight",)

    def parts(self, module: Mapping[str, StoredTensor], where: str) -> tuple[str, ...]:
        """Return which of a module's tensors `read` takes, the largest first; () where its weight is a
        tensor of floats. Raises ConfigError: quantised in a way that is not read; looks at headers only."""
        ...

    def format_of(self, module: Mapping[str, StoredTensor]) -> Format | None:
        """Return how a module's weight, of which `parts` has taken tensors, may stay packed; None: as floats."""
        return self.format

    def read(self, module: Mapping[str, Tensor]) -> Tensor | Packed:
        """Return the weight [O, I], packed or float32, on the device of its tensors. Raises ValueError: the
        tensors contradict each other."""
        ...


def group_size(columns: int, groups: int, said: int) -> int | None:
    """Columns of a group: as the config says where that gives so many groups, else an equal share; None where
    neither fits."""
    if said > 0 and -(-columns // said) == groups:
        return said
    return columns // groups if columns % groups == 0 else None


def check(entry: StoredTensor | None, name: str, dtypes: tuple[str, ...], shape: tuple[int, ...],
          where: str) -> None:
    """Raises ConfigError: a tensor that is missing, or of another type or shape than its weight needs."""
    if entry is None:
        raise missing(name, where)
    if entry.dtype not in dtypes or entry.shape != shape:
        raise ConfigError(f"{where}; its {name} is {entry.dtype} of shape {entry.shape}, expected "
                          f"{' or '.join(dtypes)} of {shape}")


def missing(name: str, where: str) -> ConfigError:
    """Return what to raise of a weight one of whose tensors no file holds."""
    return ConfigError(f"{where}, and no file holds its {show(name)}: the checkpoint is not complete")


def integers(bits: int, rows: int, columns: int, size: int) -> Format | None:
    """Return the format of integers whose groups of `size` of `columns` share a scale; None where kernels do not
    read them: groups of an odd number, or of several sizes."""
    return None if size % 2 or columns % size else Format("u8", rows, size, bits)
