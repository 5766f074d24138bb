"""What a reader of a quantised format provides, and what several of them check.

Readers are chosen before torch is imported: their arithmetic is in `formats.values`.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from penstock.config.base.errors import ConfigError, show
from penstock.model.weights.safetensors_file import StoredTensor

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.kernels.types.scaled import Scaled

FLOATS = ("F16", "BF16", "F32")         # types of scales


class WeightReader(Protocol):
    """One format: which tensors of a module are its weight, and what they mean.

    label    the format's name in the log
    beside   last parts of the names of the tensors that store a weight
    """

    label: str
    beside: frozenset[str]

    def parts(self, module: Mapping[str, StoredTensor], where: str) -> tuple[str, ...]:
        """Return which of a module's tensors `read` takes, the largest first; () where its weight is a
        tensor of floats. Raises ConfigError: quantised in a way that is not read; looks at headers only."""
        ...

    def read(self, module: Mapping[str, Tensor]) -> Tensor | Scaled:
        """Return the weight [O, I], float32 or in blocks of fp8, on the device of its tensors. Raises
        ValueError: the tensors contradict each other."""
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
        raise ConfigError(f"{where}, and no file holds its {show(name)}: the checkpoint is not complete")
    if entry.dtype not in dtypes or entry.shape != shape:
        raise ConfigError(f"{where}; its {name} is {entry.dtype} of shape {entry.shape}, expected "
                          f"{' or '.join(dtypes)} of {shape}")
