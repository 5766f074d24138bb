"""Nothing that decodes as a message can hurt the loop: the real core behind hostile messages."""
from __future__ import annotations

import importlib.util
import random
from collections import Counter
from pathlib import Path

from penstock.config.request.params import SamplingParams
from penstock.config.streams.frames import FrameBuffer
from penstock.core.core import Core
from penstock.core.plan import Retired
from penstock.core.settings import CoreConfig
from penstock.engine import wire
from penstock.engine.loop import EngineLoop

_spec = importlib.util.spec_from_file_location(
    "engine_fake", Path(__file__).with_name("engine_fake.py"))
fake = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fake)

NUMBERS = (0, 1, 2, 3, 4, 15, 16, 17, 99, 100, -1, 119, 120, 121, 1 << 31, -(1 << 31), 1 << 62,
           -(1 << 63), (1 << 64) - 1)


class Executor(fake.FakeExecutor):
    """Retires any plan of the real core; a Move is done at once."""

    def poll(self, *, block):
        if not self.plans:
            return []
        plan = self.plans.popleft()
        tokens = []
        for rid, start, count, samples in zip(plan.rids, plan.start, plan.count, plan.samples,
                                              strict=True):
            assert start + count <= 120
            if samples:
                tokens.append(((rid + start) % 100,))
        return [Retired(plan.step, tuple(tokens))]

    def close(self, rid):
        del self.prompts[rid]

    def submit(self, plan):
        assert not plan.moves
        super().submit(plan)


def hostile(rng: random.Random, newest: int) -> wire.ToEngine:
    """A message whose every number may be anything; `newest` is the last request id in use."""
    def number(usual: range) -> int:
        return rng.choice(usual) if rng.random() < 0.9 else rng.choice(NUMBERS)

    rid = number(range(max(0, newest - 5), newest + 1))
    match rng.randrange(6):
        case 0 | 1:
            params = SamplingParams(
                n=number(range(1, 9)), min_tokens=number(range(3)), max_tokens=None,
                logprobs=rng.choice((21, -1, 1 << 40)) if rng.random() < .1 else None,
                temperature=rng.choice((0.0, float("nan"), -1.0)) if rng.random() < .1 else 1.0,
                logit_bias={number(range(100)): 1.0} if rng.random() < .2 else {},
                priority=number(range(-2, 3)),
                forced=(number(range(100)),) * rng.randrange(3),
                sparse_top_k=number(range(1)) if rng.random() < .2 else None)
            prompt = [rng.randrange(100) for _ in range(number(range(1, 60)) % 130)]
            prompt += [number(range(100))]
            return wire.Submit(
                rid=rid if rng.random() < 0.3 else newest + 1, prompt=prompt,
                params=params, stop_ids=[number(range(100))], max_new=number(range(1, 60)),
                namespace=number(range(3)),
                leader=rng.choice((None, number(range(newest + 1)))), choice=number(range(1)),
                selects=rng.random() < .05, attention=number(range(1)), origin=wire.Origin(number(range(3))))
        case 2:
            return wire.Abort(rid)
        case 3:
            return wire.StopAt(rid, number(range(1, 20)))
        case 4:
            return wire.Flush()
    return wire.AskStats(number(range(9)))


def test_no_message_breaks_the_loop_or_leaks():
    rng = random.Random(3)
    core = Core(CoreConfig(page_size=4, rows=5, hbm_pages=40, step_tokens=24, max_len=120,
                           overlap=True))
    executor = Executor()
    loop = EngineLoop(core, executor, vocab_size=100, max_model_len=120, check=True)
    ends: Counter[str] = Counter()
    owed: Counter[int] = Counter()          # terminal chunks, by request id
    newest, codec = 0, FrameBuffer(wire.TO_ENGINE)
    for _ in range(2_500):
        # Through the codec, as it would come; numbers that msgpack refuses never arrive.
        [message] = codec.feed(wire.TO_ENGINE.frames(hostile(rng, newest)))
        if isinstance(message, wire.Submit) and not 0 < message.rid <= newest:
            owed[message.rid] += 1
            if message.rid < 1 << 62:
                newest = max(newest, message.rid)
        loop.handle(message)
        if rng.random() < 0.7:
            for chunk in loop.turn(block=True):
                assert owed[chunk.rid] > 0, "news of a request that has ended"
                if chunk.finish:
                    owed[chunk.rid] -= 1
                    ends[chunk.finish] += 1
    for rid in +owed:
        loop.handle(wire.Abort(rid))
    while not loop.idle:
        owed.subtract(c.rid for c in loop.turn(block=True) if c.finish)
    assert not any(owed.values()) and not executor.prompts
    assert set(ends) == {"stop", "length", "abort", "refused"} and min(ends.values()) > 20, ends
    loop.handle(wire.Flush())
    loop.turn(block=True)
    stats = core.stats()
    assert stats["hbm_pages_free"] == 40 and stats["rows_free"] == 5
