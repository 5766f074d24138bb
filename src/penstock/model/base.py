"""What every model family provides, and what the engine gives it. Tensors only, no requests.

    T tokens of the step   B sampled rows   N query heads   K KV heads   H head dim   D model dim
    V vocabulary
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from torch import Tensor

# attend(layer, q_TNH, k_TKH, v_TKH) -> out_TNH: stores k and v (RoPE applied) into the row's pages,
# then attends causally over everything that the row has stored, with `Model.attention.scale`.
Attend: TypeAlias = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """KV of one token: `num_layers` x (k, v) x `num_kv_heads` x `head_dim`."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Queries of one token: `num_heads` x `KVShape.head_dim`. Scores are q.k times `scale`."""

    num_heads: int
    scale: float


class Model(Protocol):
    """A loaded model. Built by `build`, filled by `load`, ready after `finish`."""

    kv: KVShape
    attention: AttentionShape
    vocab_size: int
    max_position: int              # context length of the checkpoint, tokens

    def load(self, name: str, tensor: Tensor) -> None:
        """Take one checkpoint tensor by its Hugging Face name; drops the source when it returns.

        Raises ConfigError on an unknown name or a wrong shape.
        """
        ...

    def finish(self) -> None:
        """Pack what is left. Raises ConfigError that lists the tensors which never came."""
        ...

    def forward(self, ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """hidden_TD after the final norm. ids and positions int64."""
        ...

    def logits(self, hidden_BD: Tensor) -> Tensor:
        """logits_BV, float32."""
        ...


class Checkpoint(Protocol):
    """A model on disk, whatever its format, presented in Hugging Face terms."""

    config: dict[str, Any]         # as config.json (GGUF metadata translated)
    eos_ids: tuple[int, ...]       # from generation_config, config, or the tokenizer

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight once, Hugging Face name and layout, one at a time (bounded memory)."""
        ...
