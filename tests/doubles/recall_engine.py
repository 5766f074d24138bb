"""The recall model behind a real core and a real rank: contexts are read, questions asked while decoding.

What a wrong row, a stale page or a lost byte does to a model that was trained to find rows shows in what it
says.

    T tokens of the step   S chosen tokens of a query
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import where
from driven import InProcess, backends
from torch import Tensor

from penstock.config.request.params import SamplingParams
from penstock.config.request.selection import indexer_selection
from penstock.config.settings.tree import KVConfig
from penstock.core.plan import Event, Token
from penstock.eval import words
from penstock.eval.tasks import Interview
from penstock.exec.load.sizing import groups_of
from penstock.exec.worker import Worker
from penstock.kernels.fused import layer
from penstock.kernels.gemm import linear
from penstock.memory.lateness import Lateness, Promptly
from penstock.model import registry as families
from penstock.model.parts import even
from penstock.model.weights.checkpoint import open_checkpoint
from penstock.model.weights.locate import locate

FOLDER = Path(__file__).parents[1] / "data" / "recall"
IDS = {word: i for i, word in enumerate(words.words())}


def ids(text: str) -> tuple[int, ...]:
    return tuple(IDS[word] for word in text.split())


@functools.cache
def model(topk: int, dtype: torch.dtype, stage=None):
    """The recall model, or one stage of it, with another number of chosen tokens than it comes
    with."""
    checkpoint = open_checkpoint(locate(str(FOLDER)))
    chosen = backends(("linear", "layer"))
    made = families.build({**checkpoint.config, "index_topk": topk}, dtype=dtype,
                          linear=functools.partial(linear.pack, backend=chosen["linear"].name),
                          ops=layer.OP.use(chosen["layer"].name), stage=stage)
    for name, tensor in checkpoint.tensors(made.wants, where.DEVICE):
        made.load(name, tensor)
    made.finish()
    return made


def shuffled(rank: Worker) -> None:
    """It chooses as many tokens as the indexer would, but any of those that may be seen."""
    random, topk = torch.Generator().manual_seed(0), rank._model.selector.top_k

    def choose(q: Tensor, weight: Tensor, key: Tensor, table: Tensor, row: Tensor, position_B: Tensor) -> Tensor:
        seen_BP = torch.arange(int(position_B.max()) + 1) <= position_B[:, None]
        draw_BP = torch.rand(seen_BP.shape, generator=random).masked_fill(~seen_BP, -1.0)
        score_BS, chosen_BS = draw_BP.topk(min(topk, seen_BP.shape[1]))
        chosen_BS = chosen_BS.where(score_BS >= 0, seen_BP.shape[1]).sort().values
        return chosen_BS.where(chosen_BS < seen_BP.shape[1], -1).int()[:, None]
    rank._attending._chooser.score = choose


@dataclass(frozen=True)
class Answers:
    """Of each interview which questions were answered right, and every given token's logprob."""

    right: list[list[bool]]
    logprobs: list[list[float]]
    stats: dict[str, float]

    @property
    def share(self) -> float:
        flat = [ok for one in self.right for ok in one]
        return sum(flat) / len(flat)


class Model(NamedTuple):
    """make(topk, dtype, stage) -> the model, or a stage of its layers; `block`: tokens that are selected together,
    0: it does not select."""

    make: Callable[..., Any]
    layers: int
    block: int = 1


TRAINED = Model(model, 4)


class Engine(InProcess):
    """Keeps each token's logprob and rank."""

    found: dict[tuple[int, int], tuple]         # by request and index

    def said(self, token: Token) -> None:
        super().said(token)
        self.found[token.rid, token.index] = self.ex.take_logprobs(token.rid, token.index)

    def poison(self) -> None:
        """Not at every turn: the pools are large."""


def ask(interviews: list[Interview], *, of: Model = TRAINED, topk: int = 256,
        step_tokens: int = 512, hbm_pages: int = 4096, dram_pages: int = 0, page_size: int = 16,
        rows: int = 4, overlap: bool = True, lateness: Lateness | None = None, hot_tokens: int = 0,
        stages: int = 1, dtype: torch.dtype = torch.float32, kept: KVConfig | None = None,
        put: Callable[[object], None] = lambda rank: None,
        script: Callable[[int, list[int]], list[Event]] = lambda turn, live: []) -> Answers:
    """Hold all interviews at once. script(turn, open requests): events to add at each turn.

    topk         tokens that a query reads, of each KV head
    hot_tokens   0: all KV stays on the device; else it is read from host pages, always, through hot buffers
                 of so many tokens
    put          a fault, of each rank
    kept         its formats of pages, None: as it computes
    """
    hot_pages, selection = -(-hot_tokens // page_size), indexer_selection(topk, of.block) if of.block else None
    engine = Engine()
    engine.found = {}
    engine.build(
        functools.partial(of.make, topk, dtype), groups_of(of.make(topk, dtype), selection, kept),
        dtype=dtype,
        layers=even(of.layers, stages), max_len=8192, lateness=lateness or Promptly(), page_size=page_size, rows=rows,
        selection=selection,
        hbm_pages=hbm_pages, dram_pages=dram_pages, step_tokens=step_tokens, overlap=overlap,
        hot_pages=hot_pages, always_hosted=hot_tokens > 0)
    for rank in engine.ex._ranks:
        put(rank)
    given = {}
    for rid, interview in enumerate(interviews):
        prompt, forced = (tuple(IDS[w] for w in text.split())
                          for text in (interview.context, interview.dialogue))
        engine.tell(rid, prompt, len(forced), SamplingParams(
            temperature=0.0, forced=forced, logprobs=0, max_tokens=len(forced)), selects=hot_tokens > 0)
        given[rid] = len(forced)
    for turn in range(100_000):
        engine.inbox += script(turn, [rid for rid in given if rid not in engine.ended])
        engine.turn()
        if len(engine.ended) == len(given):
            break
    assert engine.ended.keys() == given.keys(), "a request never ended"
    found = engine.found
    right = [[all((rid, i) in found and found[rid, i][1] == 1 for i in places) for places in one.answers]
             for rid, one in enumerate(interviews)]
    logprobs = [[found[rid, i][0] if (rid, i) in found else float("nan") for i in range(given[rid])]
                for rid in given]
    return Answers(right, logprobs, {**engine.core.stats(), **engine.ex.stats()})
