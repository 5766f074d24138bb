"""Both engines of a pair in one process, of a tiny model from a checkpoint, over a real stream."""
from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import agents
import printable
import where
from driven import asked

from penstock.config.base.machine import probe
from penstock.config.request.params import SamplingParams
from penstock.config.request.scores import Scores
from penstock.config.settings.cli import from_options
from penstock.config.settings.resolve import resolve
from penstock.core.core import Core
from penstock.core.plan import Dropped, Paused, RequestId
from penstock.engine.loop import EngineLoop
from penstock.engine.pd.open import open_peers
from penstock.engine.pd.router import Peers
from penstock.engine.storing import Storing
from penstock.engine.wire import Abort, BootstrapRoom, OutputChunk, Submit, TokenLogprob
from penstock.exec.start.build import Built, build_engine

SIZES = {"dtype": "float32", "threads": 1, "max_num_seqs": 4, "seed": 1, "step_tokens": 48}
LIMIT_S = 60.0


class End:
    """One engine and its loop; a whole one without `mode`."""

    def __init__(self, model: str, mode: str | None = None, **options: object) -> None:
        given = {**SIZES, "device": where.DEVICE, **options, "disaggregation_mode": mode}
        given, self.agents = agents.started(model, given)
        config = resolve(from_options(model, given), probe())
        built = build_engine(config, lambda _: None, vocabulary=printable.vocabulary)
        storage = built.executor.storage
        self.begin(built, Core(built.core_config), open_peers(config, built), config.pair.kv_timeout_s,
                   None if storage is None else Storing(storage, config.kv.kv_storage_policy))

    def begin(self, built: Built, core: Core, peers: Peers | None = None, timeout_s: float = LIMIT_S,
              storing: Storing | None = None) -> None:
        self.built, self.core, self.peers = built, core, peers
        self.peer = None if peers is None else peers.each[0]
        self.loop = EngineLoop(
            core, built.executor, vocab_size=built.vocab_size, max_model_len=built.max_model_len,
            selection=built.selection, check=True, peers=peers, storing=storing,
            deadlines_s={"receiving": timeout_s})
        self.got: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[TokenLogprob]] = {}
        self.prompts: dict[int, Scores] = {}
        self.ended: dict[int, OutputChunk] = {}
        self.cached: dict[int, OutputChunk] = {}
        self._rid = 0

    def submit(self, prompt: Sequence[int], max_new: int = 12, *, namespace: int = 0,
               stop_ids: Sequence[int] = (), room: BootstrapRoom | None = None, **params: object) -> int:
        """Greedy unless `params` say otherwise, and selecting as a client's would be. Returns its number."""
        self._rid += 1
        sampling, more = asked(self.built.selection, SamplingParams(**{"temperature": 0.0, **params}),
                               len(prompt), max_new)
        self.loop.handle(Submit(rid=self._rid, prompt=list(prompt), params=sampling,
                                stop_ids=list(stop_ids),
                                max_new=max_new, namespace=namespace, room=room, **more))
        self.got[self._rid], self.logprobs[self._rid] = [], []
        return self._rid

    def abort(self, rid: int) -> None:
        self.loop.handle(Abort(rid))

    def pause(self, rid: int, kind: type[Paused] | type[Dropped] = Paused) -> None:
        self.loop._events.append(kind(RequestId(rid)))

    def turn(self) -> None:
        for chunk in self.loop.turn(block=self.peer is None or self.loop.works_here):
            assert not chunk.tokens or chunk.index == len(self.got[chunk.rid])
            self.got[chunk.rid] += chunk.tokens
            self.logprobs[chunk.rid] += chunk.logprobs or []
            self.prompts |= {} if chunk.prompt is None else {chunk.rid: chunk.prompt}
            if chunk.cached_by_tier is not None:
                self.cached[chunk.rid] = chunk
            if chunk.finish is not None:
                self.ended[chunk.rid] = chunk

    @property
    def open(self) -> set[int]:
        return set(self.got) - set(self.ended)

    def free(self) -> dict[str, float]:
        """What is neither held nor behind a fence, by tier, once nothing is cached."""
        stats = self.core.stats()
        return {name: n for name, n in stats.items() if name.endswith(("_pages_held", "_pages_fenced"))}

    def close(self) -> None:
        if self.peers is not None:
            self.peers.close()
        if self.built.workers is not None:
            self.built.workers.close(asked=True)
        agents.ended(self.agents)
        if self.built.executor.storage is not None:
            self.built.executor.storage.store.close()     # its descriptors


class PairOfEnds:
    """A prefill and a decode engine on a Unix socket; a `with` of it ends both."""

    def __init__(self, model: str, folder: Path, *, prefill: dict[str, object] | None = None,
                 decode: dict[str, object] | None = None, **options: object) -> None:
        key, socket = folder / "key", f"unix:{folder / 'socket'}"
        key.write_text("0123456789abcdef")
        key.chmod(0o600)
        both = {"pair_key_file": str(key), **options}
        self.prefill = End(model, "prefill", **{**both, "disaggregation_listen": socket, **(prefill or {})})
        self.decode = End(model, "decode", **{**both, "disaggregation_connect": [socket], **(decode or {})})
        self.until(lambda: self.decode.peer.epoch and self.prefill.peer.epoch)

    def __enter__(self) -> PairOfEnds:
        return self

    def __exit__(self, *_: object) -> None:
        self.decode.close()
        self.prefill.close()

    def turn(self) -> None:
        self.prefill.turn()
        self.decode.turn()

    def until(self, done) -> None:
        began = time.monotonic()
        while not done():
            assert time.monotonic() - began < LIMIT_S, "nothing happens any more"
            self.turn()
            if not (self.prefill.loop.wait_s == 0 or self.decode.loop.wait_s == 0):
                time.sleep(0.001)

    def finish(self) -> dict[int, list[int]]:
        """Until all of the decode engine's requests have ended; what they say."""
        self.until(lambda: not self.decode.open)
        return self.decode.got

    def settle(self) -> None:
        """Until the prefill engine has nothing left, and the stream is empty."""
        self.until(lambda: not self.prefill.core.live and not self.prefill.core.kv.moves.flying
                   and not self.decode.core.kv.moves.flying)


class Engines:
    """One engine, or both ends of a pair: the one that is asked, and all that have a turn."""

    def __init__(self, *ends: End) -> None:
        self.asked, self.ends = ends[-1], ends

    def turn(self) -> None:
        for end in self.ends:
            end.turn()

    def say(self, asked: Sequence[tuple[Sequence[int], int]], pauses: type[Paused] | type[Dropped] | None = None,
            turns: int = 0, **more: object) -> list[list[int]]:
        """What is said to prompts, each with its number of tokens, all at once. pauses: each request gets such an
        event after every third token, or one after the other in so many turns."""
        told, turn = {self.asked.submit(prompt, new, **more): 0 for prompt, new in asked}, 0
        while self.asked.open:
            for rid in sorted(told.keys() & self.asked.open) if pauses else ():
                said = len(self.asked.got[rid])
                if rid == list(told)[turn // turns % len(told)] if turns and turn % turns == 0 else (
                        not turns and said >= told[rid] + 3):
                    self.asked.pause(rid, pauses)
                    told[rid] = said
            self.turn()
            turn += 1
        self.newest = list(told)
        return [self.asked.got[rid] for rid in told]

    def cached(self, *tiers: str) -> int:
        """Tokens of the last prompts that were found there."""
        return sum(self.asked.cached[rid].cached_by_tier.get(tier, 0) for rid in self.newest for tier in tiers)

    def settle(self) -> None:
        """Until all is written, and nothing lives."""
        while any(end.loop.moves_in_flight or end.core.live for end in self.ends):
            self.turn()


@contextmanager
def engines(model: str, folder: Path, layout: Sequence[Mapping[str, object]],
            decode: Mapping[str, object] | None = None, **options: object) -> Iterator[Engines]:
    """Options of one engine, or of both ends of a pair; decode: those of the one that is asked."""
    if len(layout) == 2:
        own = {**layout[1], **(decode or {})}
        with PairOfEnds(model, folder, prefill=dict(layout[0]), decode=own, **options) as pair:
            yield Engines(pair.prefill, pair.decode)
        return
    end = End(model, **{**options, **layout[0], **(decode or {})})
    try:
        yield Engines(end)
    finally:
        end.close()


def whole(model: str, prompts: Iterable[Sequence[int]], max_new: int = 12,
          params: dict[str, object] | None = None, **options: object) -> End:
    """The same by one engine."""
    end = End(model, **options)
    for prompt in prompts:
        end.submit(prompt, max_new, **(params or {}))
    while end.open:
        end.turn()
    return end

