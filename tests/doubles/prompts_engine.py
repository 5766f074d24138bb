"""The loop of an engine process without the process, over tiny models, and the prompts that tests play."""
from __future__ import annotations

import functools
from dataclasses import dataclass, field

import pytest
import ranks
import torch
import where
from dense_attend import Dense

from penstock.config.request.params import SamplingParams
from penstock.core.core import Core
from penstock.core.plan import (
    Arrived,
    Event,
    Finished,
    Moved,
    Outcome,
    RequestId,
    Started,
    Token,
)
from penstock.core.settings import CoreConfig
from penstock.exec.load.layout import caches_of
from penstock.exec.step.attend import LatentOps
from penstock.kernels.attention import latent_attention, paged_attention
from penstock.kernels.choose import index_select
from penstock.memory.lateness import Promptly
from penstock.model.base import CacheShape

CONFIG = {
    "model_type": "qwen3", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
LATENT = {
    "model_type": "deepseek_v32", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "first_k_dense_replace": 2, "num_attention_heads": 4, "q_lora_rank": 24,
    "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "index_n_heads": 4,
    "index_head_dim": 16, "index_topk": 4, "n_routed_experts": 2, "num_experts_per_tok": 1,
    "moe_intermediate_size": 8, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
}
CONFIGS = {"grouped": CONFIG, "latent": LATENT}       # one cache group; two, and a choice of 4 tokens
EXPERTS = {**CONFIG, "model_type": "qwen3_moe", "num_experts": 5, "num_experts_per_tok": 2,
           "moe_intermediate_size": 24, "norm_topk_prob": True}
GREEDY = SamplingParams(temperature=0.0)


@functools.cache
def model(family="grouped", stage=None):
    return where.model({**CONFIGS, "experts": EXPERTS}[family], torch.float32, 5, 10, stage)


# Each layer a group, and what a selector would have: a quarter of a page of theirs, less two rows.
THREE = (CacheShape(name="even", layers=(0,), num_kv_heads=2, head_dim=8),
         CacheShape(name="odd", layers=(1,), num_kv_heads=2, head_dim=8),
         CacheShape(name="index", layers=(0, 1), num_kv_heads=1, head_dim=7, planes=1, unit=2,
                    selector=True))


@functools.cache
def dense(prompt: tuple[int, ...], n: int, family="grouped") -> tuple[int, ...]:
    """Greedy tokens, recomputing everything for each. Every choice is clear-cut."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(n):
            m = model(family)
            hidden = m.forward(*where.sequence(tokens), Dense(m.attention))
            best = m.logits(hidden[-1:])[0].topk(2)
            assert best.values[0] - best.values[1] > 3e-5, "choose another seed for the weights"
            tokens.append(int(best.indices[0]))
    return tuple(tokens[len(prompt):])


@dataclass
class Engine:
    """The loop of an engine process, without the process."""

    hbm_pages: int = 64
    dram_pages: int = 64
    step_tokens: int = 64
    wait_pages: int = 0
    overlap: bool = True
    rows: int = 4
    lateness: object = field(default_factory=Promptly)
    backend: str = field(default_factory=lambda: "cuda" if where.DEVICE == "cuda" else "reference")
    groups: tuple[CacheShape, ...] = ()         # of the model; () for its own
    family: str = "grouped"
    got: dict[int, list[int]] = field(default_factory=dict)
    ended: dict[int, Finished] = field(default_factory=dict)
    started: dict[int, Started] = field(default_factory=dict)
    moved: list[Moved] = field(default_factory=list)
    waited: int = 0                             # plans that named loads
    inbox: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.family == "latent" and where.DEVICE != "cpu":
            pytest.skip("ops of latent rows run on the CPU only")
        groups = self.groups or model(self.family).groups
        caches = caches_of(groups, 4, torch.float32)
        self.cfg = CoreConfig(
            page_size=4, rows=self.rows, hbm_pages=self.hbm_pages, dram_pages=self.dram_pages,
            step_tokens=self.step_tokens, wait_pages=self.wait_pages, overlap=self.overlap, hbm_base=500,
            dram_base=9000,
            group_base=50_000, row_base=70, groups=caches.groups)
        self.core = Core(self.cfg)
        ops = (functools.partial(paged_attention.plan, backend=self.backend) if self.family != "latent"
               else LatentOps(index_select.OP.use(self.backend),
                              latent_attention.OP.use(self.backend)))
        self.ex, hbm, dram = ranks.front(functools.partial(model, self.family), ops, groups, caches,
                                         self.cfg, max_len=64, lateness=self.lateness)
        kv = self.core.kv
        self.pools = [(pool, side[pool.group].pool) for pools, side in ((hbm, kv.device), (dram, kv.host))
                      for pool in pools]
        self.poison()

    def poison(self) -> None:
        """Nobody may read a page that is on a free list before it is written again."""
        for pool, units in self.pools:
            for page in units._free:
                pool.page(page).fill_(float("nan"))

    def add(self, rid: int, prompt: tuple[int, ...], max_new: int, params=GREEDY, **more) -> None:
        self.ex.open(RequestId(rid), prompt, params, stop_ids=tuple(more.get("stop", ())))
        self.got[rid] = []
        self.inbox.append(Arrived(RequestId(rid), prompt, max_new, **more))

    def turn(self) -> bool:
        """Advance, submit, poll. False when nothing is left to do."""
        events, self.inbox = self.inbox, []
        while True:
            adv = self.core.advance(events)
            events = []
            for o in adv.outputs:
                match o:
                    case Token(rid, index, token):
                        assert index == len(self.got[rid])
                        self.got[rid].append(token)
                    case Started(rid):
                        self.started[rid] = o
                    case Finished(rid):
                        self.ended[rid] = o
                        self.ex.close(rid)
            if adv.plan is None:
                break
            self.waited += bool(adv.plan.waits)
            self.ex.submit(adv.plan)
        self.core.check()
        self.poison()
        found = self.ex.poll(block=True)
        self.moved += [e for e in found if isinstance(e, Moved)]
        self.inbox += found
        return bool(found)

    def drain(self, turns: int = 5000) -> None:
        for _ in range(turns):
            if not self.turn():
                break
        assert set(self.ended) == set(self.got), "a request never ended"
        assert self.ex.stats()["executor_requests"] == 0
        held = self.core.stats()
        assert held["hbm_pages_in_use"] == held["moves_in_flight"] == 0


SHARED = (7, 3, 29, 41, 5, 5, 18, 60, 2, 33, 9)
BACKENDS = where.backends()
SMALL = {"grouped": 11, "latent": 18, "experts": 11}     # device pages of group 0, too few; slabs of 1
PROMPTS = {1: (*SHARED, 1, 2), 2: (*SHARED, 40), 3: (50,), 4: SHARED * 2, 5: (12, 8, 30, 21),
           6: SHARED[:8], 7: (*SHARED, *SHARED, 4, 4)}


def play(engine: Engine, script=lambda turn: (), new: int = 12, arrive=lambda rid: 2 * rid) -> None:
    """All PROMPTS, one after the other, with the events that `script` adds at each turn."""
    waiting = dict(PROMPTS)
    for turn in range(400):
        for rid in [r for r in waiting if turn >= arrive(r)]:
            engine.add(rid, waiting.pop(rid), new)
        engine.inbox += script(turn)
        engine.turn()
    engine.drain()
    assert {rid: tuple(t) for rid, t in engine.got.items()} == {
        rid: dense(p, new, engine.family) for rid, p in PROMPTS.items()}
    assert {f.outcome for f in engine.ended.values()} == {Outcome.LENGTH}
