"""An engine without a model: the real loop and link over a core that echoes prompts.

Imported by the loop's tests and started as a process by the client's. Output token i of a request
is prompt[i % len(prompt)]; a prompt that begins with 13 crashes the engine at its third token, one
that begins with 14 gets no token after its third, so that only an abort ends it, one that begins
with 15 is refused, and one that begins with 16 is a fault of the model at its third token.
"""
from __future__ import annotations

import os
import sys
import tempfile
import time
from array import array
from collections import deque
from types import SimpleNamespace

from penstock.config.base.errors import ConfigError
from penstock.config.request.params import SamplingParams
from penstock.config.request.scores import PromptScores, Scores
from penstock.core.lifecycle import Phase, Place, State, Trigger
from penstock.core.plan import (
    Aborted,
    Advance,
    Arrived,
    Finished,
    Outcome,
    Retired,
    Started,
    StepId,
    StepPlan,
    Stopped,
    Token,
)
from penstock.core.settings import CoreConfig

VOCAB, CONTEXT = 100, 1000
INFO = {"page_size": 16, "max_num_seqs": 100}
CRASH, ENDLESS, REFUSED, FAULT = 13, 14, 15, 16
FAULT_REASON = "the logits are not finite"
DECODES = State(Phase.DECODE, Place.DEVICE)


class FakeRequest:
    """What the flight recorder reads of a request, and `planned`: tokens."""

    def __init__(self, arrived) -> None:
        self.arrived, self.rid, self.phase, self.state = arrived, arrived.rid, Phase.DECODE, DECODES
        self.tokens, self.num_prompt, self.planned = list(arrived.prompt), len(arrived.prompt), 0
        self.computed = self.num_prompt

    @property
    def num_output(self):
        return len(self.tokens) - self.num_prompt

    @property
    def num_tokens(self):
        return len(self.tokens)


class FakeCore:
    """Runs every request at once, one token a step, `depth` steps in flight."""

    flushing = False

    def __init__(self, depth: int = 1) -> None:
        self.depth = depth
        self.cfg = CoreConfig(page_size=16, rows=100, hbm_pages=100)
        self.live: dict[int, FakeRequest] = {}
        self.plans: dict[int, StepPlan] = {}
        self.step = 0
        self.checks = 0
        self.seen: list = []
        self.watchers: list = []
        self.waiting: list = []
        self.kv = SimpleNamespace(rows=SimpleNamespace(free=self.cfg.rows))

    def advance(self, events):
        outputs: list = []
        for e in events:
            self.seen.append(e)
            match e:
                case Arrived() if e.prompt[0] == REFUSED:
                    outputs.append(Finished(e.rid, Outcome.REFUSED, "it can never fit"))
                case Arrived():
                    self.live[e.rid] = FakeRequest(e)
                    outputs.append(Started(e.rid, hbm_tokens=2, dram_tokens=1))
                case Aborted():
                    self._end(e.rid, Outcome.ABORT, outputs)
                case Stopped():
                    self._end(e.rid, Outcome.STOP, outputs)
                case Retired():
                    for rid, tokens in zip(self.plans.pop(e.step).rids, e.tokens, strict=True):
                        self._retire(rid, tokens, outputs)
        return Advance(self._plan(), tuple(outputs))

    def _retire(self, rid, tokens, outputs):
        for token in tokens:
            if rid not in self.live:
                return
            r = self.live[rid]
            outputs.append(Token(rid, r.num_output, token))
            r.tokens.append(token)
            if token in r.arrived.stop:
                self._end(rid, Outcome.STOP, outputs)
            elif r.num_output == r.arrived.max_new:
                self._end(rid, Outcome.LENGTH, outputs)

    def _end(self, rid, outcome, outputs):
        if rid in self.live:
            r = self.live.pop(rid)
            r.phase, r.state = Phase.DONE, State(Phase.DONE, Place.DEVICE)
            for watcher in self.watchers:
                watcher.taken(r, DECODES, Trigger.END)
            outputs.append(Finished(rid, outcome))

    def _plan(self):
        ready = [(rid, r) for rid, r in self.live.items() if r.planned < r.arrived.max_new]
        if not ready or len(self.plans) >= self.depth:
            return None
        self.step += 1
        plan = StepPlan(
            step=StepId(self.step), rows=tuple(range(len(ready))),
            rids=tuple(rid for rid, _ in ready), start=tuple(r.planned for _, r in ready),
            count=(1,) * len(ready), samples=(True,) * len(ready), tokens=(77,) * len(ready),
            grows=(), binds=(), moves=())
        for _, r in ready:
            r.planned += 1
        self.plans[self.step] = plan
        return plan

    def check(self):
        self.checks += 1

    def stats(self):
        return {"rows_used": float(len(self.live))}


class FakeExecutor:
    """Retires the oldest plan at each poll."""

    def __init__(self) -> None:
        self.prompts: dict[int, list[int]] = {}
        self.plans: deque[StepPlan] = deque()
        self.polls: list[bool] = []
        self.budgets: dict[int, int | None] = {}        # of every request so far
        self.params: dict[int, SamplingParams] = {}

    def open(self, rid, prompt, params, *, choice, stop_ids):
        assert rid not in self.prompts
        self.budgets[rid], self.params[rid] = params.sparse_top_k, params
        self.prompts[rid] = list(prompt)

    def compiled(self, grammar):
        return True

    def close(self, rid):
        if all(rid not in plan.rids for plan in self.plans):
            del self.prompts[rid]

    def kv_reads(self, rid):
        return {"hot_hits": 2, "hot_misses": self.budgets[rid]} if self.budgets[rid] else None

    def drafts(self, rid):
        return 0, 0

    def fault(self, rid):
        return FAULT_REASON if self.prompts[rid][0] == FAULT else None

    def take_logprobs(self, rid, index):
        return -0.5, 1, [(self.prompts[rid][0], -0.5)]

    def take_prompt(self, rid):
        """The same of every token: its logprob is minus its place."""
        prompt, params = self.prompts[rid], self.params[rid]
        if params.prompt_logprobs is None:
            return None
        scores, places = PromptScores(params, len(prompt)), range(params.prompt_from, len(prompt))
        best = [(token, -float(i)) for i in places for token in range(params.prompt_logprobs)]
        scores.add(Scores(places.start, array("f", [-float(i) for i in places]).tobytes(),
                          array("i", [1] * len(places)).tobytes(), array("i", [t for t, _ in best]).tobytes(),
                          array("f", [p for _, p in best]).tobytes()))
        return scores

    def submit(self, plan):
        self.plans.append(plan)

    @property
    def works_here(self):
        return bool(self.plans)

    def poll(self, *, block):
        self.polls.append(block)
        if not self.plans:
            return []
        plan = self.plans.popleft()
        out, aborts = [], []
        for rid, start in zip(plan.rids, plan.start, strict=True):
            prompt = self.prompts[rid]
            if prompt[0] == CRASH and start == 2:
                raise RuntimeError("a device fault")
            silent = prompt[0] in (ENDLESS, FAULT) and start >= 2 + (prompt[0] == ENDLESS)
            out.append(() if silent else (prompt[start % len(prompt)],))
            if prompt[0] == FAULT and start == 2:
                aborts.append(Aborted(rid))
        return [Retired(plan.step, tuple(out)), *aborts]

    def stats(self):
        return {"steps_total": 3.0}


def main() -> None:
    from penstock.config.request.selection import selection_of
    from penstock.engine import process as engine_main
    from penstock.engine import wire
    from penstock.engine.loop import EngineLoop
    from penstock.exec.waker import Waker

    def build(config, event_log):
        print("loading a fake", flush=True)
        if config.model.model == "missing":
            raise ConfigError("model missing: there is no such folder")
        if config.model.model == "slow":
            time.sleep(1000)
        selection = selection_of(config.kv)
        loop = EngineLoop(FakeCore(depth=2), FakeExecutor(), vocab_size=VOCAB,
                          max_model_len=CONTEXT, selection=selection, event_log=event_log)
        ready = wire.EngineReady(pid=0, vocab_size=VOCAB, max_model_len=CONTEXT, info=INFO, selection=selection,
                           dense_len=CONTEXT)
        return engine_main.EngineParts(loop=loop, ready=ready, wakes=Waker(), workers=None, peers=None, publisher=None,
                                  begin=lambda: None)

    # What a crash of a fake leaves behind is not the user's.
    os.environ.setdefault("PENSTOCK_CACHE", f"{tempfile.gettempdir()}/penstock-fake-{os.getuid()}")
    engine_main.build = build
    engine_main.main(sys.argv[1:])


if __name__ == "__main__":
    main()
