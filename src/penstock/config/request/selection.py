"""What the decode of a request computes when it does not read all of its KV, and the number of it.

Pages that such a decode writes differ from those of a prefill of the same tokens, so the prefix
tree keeps them apart: under a number that two engines, and two starts of one, agree upon.
"""
from __future__ import annotations

import hashlib
from dataclasses import astuple, dataclass, replace

from penstock.config.base.errors import RequestError
from penstock.config.request.params import SamplingParams
from penstock.config.settings.tree import KVConfig

BOUNDS = "bounds"       # a unit's score comes from what q.k can be by the bounds of its keys
INDEXER = "indexer"     # the model's own: every query, of a prompt too, reads the tokens that it chooses
BOUNDS_VERSION = 2      # rises when its scores, its ties or what it always keeps change
SINKS, WINDOW = 16, 64  # tokens always kept: the first, and the last, a query's own included


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Everything that changes what a selecting decode computes. Residency and batches are not in it.

    budget   tokens of each KV head that a step reads, what is always kept included; of a server, the
             largest; a multiple of `unit`
    unit     tokens chosen together      sinks, window   first and last tokens, always kept
    dense    layers that read all of their KV, by global number
    """

    selector: str
    version: int
    unit: int
    budget: int
    sinks: int
    window: int
    dense: tuple[int, ...] = ()

    @property
    def native(self) -> bool:
        """Whether the model chooses, for every request alike, and prompts as outputs."""
        return self.selector == INDEXER

    @property
    def least(self) -> int:
        """The smallest budget: units of the sinks, those that a window can touch, and one to choose."""
        if self.native:
            return self.budget
        units = -(-self.sinks // self.unit) + (self.window + self.unit - 2) // self.unit + 1
        return (units + 1) * self.unit

    def of(self, params: SamplingParams, prompt: int, max_new: int) -> Selection | None:
        """What a request of so many tokens selects; None: it reads all, as it asks or as it is short.

        Raises RequestError for a budget that this server does not give.
        """
        asked = params.sparse_top_k
        if self.native:
            if asked not in (None, self.budget):
                raise RequestError(f"sparse_top_k is {asked}: this model's indexer selects {self.budget} tokens: "
                                   "leave it out", "sparse_top_k")
            return self
        if asked is not None and asked > self.budget:
            raise RequestError(f"sparse_top_k is {asked}: at most {self.budget}, the server's "
                               "--sparse-top-k; 0 reads all KV", "sparse_top_k")
        if asked is not None and 0 < asked < self.least:
            raise RequestError(
                f"sparse_top_k is {asked}: at least {self.least}, as the first {self.sinks} tokens and the "
                f"last {self.window} are always read and one block of {self.unit} selected; 0 reads all KV",
                "sparse_top_k")
        found = self if asked is None else self.within(asked)
        return found if asked != 0 and prompt + max_new - 1 > found.budget else None

    def within(self, budget: int) -> Selection:
        """The same with `budget` tokens, rounded down to units."""
        return replace(self, budget=budget // self.unit * self.unit)


def selection_of(kv: KVConfig) -> Selection | None:
    """What --sparse-top-k and its siblings ask of a model without a selector of its own; None: nothing."""
    if kv.sparse_top_k is None:
        return None
    return Selection(
        selector=BOUNDS, version=BOUNDS_VERSION, unit=kv.sparse_block_size, budget=kv.sparse_top_k,
        sinks=SINKS, window=WINDOW, dense=tuple(sorted({int(i) for i in kv.sparse_dense_layers})),
    ).within(kv.sparse_top_k)


def indexer_selection(topk: int, unit: int = 1) -> Selection:
    """What a model with a selector of its own selects: `topk` tokens, so many at a time. What it always keeps is the
    model's business."""
    return Selection(selector=INDEXER, version=1, unit=unit, budget=topk, sinks=0, window=0)


def attention_identity(selection: Selection) -> int:
    """`Arrived.attention` of a request that selects so: positive and under 2**63, since page keys
    have its negative; the same in every process. 0 where prompts are computed as outputs are: all
    pages of the model serve all of its requests."""
    if selection.native:
        return 0
    text = "/".join(map(str, astuple(selection)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) % (2**63 - 1) + 1
