"""The engines of this process as one worker of Dynamo: its `LLMEngine`, which Dynamo's own Worker drives.

Owns the order of start and end, open requests, and the numbers that a router reads. What fields mean is `request`'s.
"""
from __future__ import annotations

import argparse
import asyncio
import logging
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

import msgspec
import uvloop
from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, Worker, WorkerConfig
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.publisher import ComponentSnapshot, ZmqSource
from dynamo.common.constants import DisaggregationMode
from dynamo.common.utils.token_ids import normalize_request_token_ids
from dynamo.llm.exceptions import Cancelled, EngineShutdown, InvalidArgument, Unknown, WorkerUnavailable

from penstock.cli.main import parsed
from penstock.config.base.errors import ConfigError, RequestError
from penstock.config.request.defaults import params as default_params
from penstock.config.request.grammar import TOO_COMPLEX
from penstock.config.settings.kv_events import kv_events
from penstock.config.settings.tree import Config
from penstock.dynamo.request import Asked, chunk, last, prompt_logprobs, read
from penstock.engine.client.client import EngineDied
from penstock.engine.client.dialect import CacheUsage
from penstock.engine.client.generation import Ended, Generation
from penstock.engine.client.metrics import Metrics
from penstock.engine.client.namespaces import namespace, session_number
from penstock.engine.client.replicas import Engines, Member, start_all
from penstock.engine.wire import Origin
from penstock.memory.stores.secret import secret_for
from penstock.model.source.hub import pull
from penstock.model.weights.locate import ModelFiles, files_of
from penstock.text.model_text import ModelText, open_text

log = logging.getLogger("penstock")
EVERY_S = 0.5           # between two readings of the engines' numbers
RENEWED_S = 1.0         # after an engine was started again: until Dynamo reads its events
MODES = {None: DisaggregationMode.AGGREGATED, "prefill": DisaggregationMode.PREFILL,
         "decode": DisaggregationMode.DECODE}


class Backend(LLMEngine):  # type: ignore[misc]
    """Everything on one asyncio loop but the text of metrics."""

    def __init__(self, config: Config, files: ModelFiles, text: ModelText) -> None:
        self.failed: Exception | None = None        # why this worker ends by itself
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        if config.kv.prefix_cache:
            self._folder = tempfile.TemporaryDirectory(prefix="penstock-dynamo-")       # of this user alone
            config = replace(config, kv=replace(config.kv, kv_events_config=_events(config, self._folder.name)))
        self._config, self._files, self._text = config, files, text
        self._mode = config.pair.disaggregation_mode
        self._defaults = default_params(text.sampling)
        self._secret = secret_for(config.kv) or secrets.token_bytes(32)
        self._engines = Engines(config, log.info, self._on_death)
        self._metrics = Metrics()
        self._open: dict[Generation, str] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._stats: list[dict[str, float]] = []
        self._publisher: Any = None
        self._watching: asyncio.Task[None] | None = None

    # ------------------------------------------------------------ start and end
    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[Backend, WorkerConfig]:
        """For programs that start Dynamo's workers themselves. Raises ConfigError."""
        found = parsed("dynamo", sys.argv[1:] if argv is None else argv)
        if found is None:
            raise SystemExit(0)
        assert found[0] is not None, "the command line takes a MODEL"
        return worker(found[0], found[1])

    async def start(self, worker_id: int) -> EngineConfig:
        """Load the model, and say what a router and its requests need to know of it."""
        try:
            await start_all(self._engines.members)
            self._stats = [await m.engine.stats() for m in self._engines.members]
        except (ConfigError, EngineDied) as e:
            self.failed = e
            raise EngineShutdown(str(e)) from None
        self._watching = asyncio.create_task(self._watch())
        names = self._config.model.served_model_name
        return EngineConfig(model=str(self._files.folder), served_model_name=served_name(self._config, self._files),
                            model_aliases=list(names[1:]), llm=self._registration())

    def _registration(self) -> LlmRegistration:
        ready, usage = self._engines.ready, CacheUsage.of(self._engines.ready.info)
        host, _, port = str(ready.info.get("pair_address") or "").rpartition(":")
        prefills = self._mode == "prefill"
        return LlmRegistration(
            context_length=ready.max_model_len, kv_cache_block_size=self._engines.members[0].known("page_size"),
            total_kv_blocks=int(usage.pages(self._stats[0])), max_num_seqs=self._config.schedule.max_num_seqs,
            max_num_batched_tokens=self._engines.members[0].known("step_tokens"),
            data_parallel_size=len(self._engines.members),
            bootstrap_host=host if prefills else None, bootstrap_port=int(port) if prefills else None)

    async def is_quiescent(self) -> bool:
        """Whether a prefill worker has sent all that decode workers wait for."""
        stats = [await m.engine.stats() for m in self._engines.members if not m.missing]
        return not self._open and not any(s.get(name) for s in stats for name in (
            "requests_running", "requests_waiting", "requests_paused", "hbm_pages_in_use"))

    async def cleanup(self) -> None:
        """Let open requests end for `--drain-s`, then end the engines. Idempotent."""
        self._draining = True
        if self.failed is None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), self._config.server.drain_s)
        if self._watching is not None:
            self._watching.cancel()
        await self._engines.close(0.0 if self._config.kv.kv_storage is None else self._config.server.drain_store_s)
        self._text.close()
        if self._folder is not None:
            self._folder.cleanup()

    def _on_death(self, error: EngineDied) -> None:
        self.failed = error
        log.error("%s", str(error).splitlines()[0])
        if self._watching is not None:              # else `start` fails with it
            os.kill(os.getpid(), signal.SIGTERM)    # Dynamo's Worker leaves the discovery first

    # ------------------------------------------------------------ requests
    async def generate(self, request: dict[str, Any], context: Any) -> AsyncGenerator[dict[str, Any], None]:
        """Yield new tokens as they come; the last chunk has the finish reason and the usage."""
        generation: Generation | None = None
        session = 0
        try:
            asked, prompt, root = await self._read(request)
            generation = Generation(self._engine(asked.rank), None, self._metrics)
            if not context.is_stopped():
                self._open[generation] = context.id()
                self._idle.clear()
                # Without a secret: both workers of a pair have the same numbers, and whoever asks is one tenant.
                session = session_number(b"", b"", asked.session) if asked.session else 0
                generation.submit(prompt, asked.params, eos_ids=asked.eos_ids, namespace=root, room=asked.room,
                                  origin=Origin(session=session))
                if asked.handoff is not None:
                    yield {"token_ids": [], "index": 0, "disaggregated_params": asked.handoff}
                async with aclosing(self._chunks(generation, asked)) as chunks:
                    async for found in chunks:
                        yield found
                        if "finish_reason" in found:
                            return
            yield {"token_ids": [], "index": 0, **last("cancelled", generation.usage, None)}
        except (RequestError, EngineDied, Ended) as e:
            raise refusal(e, alone=len(self._engines.members) == 1) from None
        finally:
            if generation is not None:
                await generation.close()
                self._open.pop(generation, None)
                if session and asked.ends_session:
                    self._engines.of_session(session, ends=True)
            if not self._open:
                self._idle.set()

    def _engine(self, rank: int | None) -> Engines | Member:
        """Return the engine that the router has chosen, or all for any of them while that one starts again."""
        found = self._engines.of(rank if len(self._engines.members) > 1 else None)
        return self._engines if isinstance(found, Member) and found.missing else found

    async def _read(self, request: dict[str, Any]) -> tuple[Asked, list[int], int]:
        """Return what is asked, its prompt for `submit`, and its namespace. Raises RequestError, EngineShutdown."""
        if self._draining:
            raise EngineShutdown("this worker ends: send the request to another one")
        normalize_request_token_ids(request)
        address = str(self._engines.ready.info.get("pair_address") or "")
        asked = read(request, self._defaults, self._mode, address)
        await self._text.check(asked.params)
        root = namespace(self._secret, b"", asked.salt)
        return asked, await self._engines.hashed(asked.prompt, root), root

    async def _chunks(self, generation: Generation, asked: Asked) -> AsyncGenerator[dict[str, Any], None]:
        scores = None
        async with aclosing(generation.batches()) as batches:
            async for batch in batches:
                for piece in batch:
                    if piece.prompt is not None:
                        scores = prompt_logprobs(asked.prompt, piece.prompt, self._text.token)
                    found = chunk(piece, self._text.token)
                    if piece.finish is not None:
                        found |= last(piece.finish, generation.usage, scores)
                        if asked.handoff is not None:
                            found["disaggregated_params"] = asked.handoff
                    yield found

    async def abort(self, context: Any) -> None:
        """The client has gone, or Dynamo has found a stop string: free what the request holds."""
        number = context.id()
        for generation in [g for g, of in self._open.items() if of == number]:
            await generation.close()

    # ------------------------------------------------------------ numbers, events, controls
    async def kv_event_sources(self) -> list[ZmqSource]:
        """Where Dynamo reads which pages each engine has cached."""
        events = kv_events(self._config.kv.kv_events_config)
        return [] if events is None else [
            ZmqSource(msgspec.structs.replace(events, data_parallel_rank=rank).at(events.endpoint), dp_rank=rank)
            for rank in range(len(self._engines.members))]

    def component_metrics_dp_ranks(self) -> list[int]:
        return list(range(len(self._engines.members)))

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        self._publisher = publisher

    async def register_prometheus(self, metrics: Any) -> None:
        """Our metrics on Dynamo's /metrics, as of the last reading of the engines."""
        metrics.register_prometheus_expfmt_callback(lambda: self._metrics.text(self._stats).decode())

    async def _watch(self) -> None:
        usage = CacheUsage.of(self._engines.ready.info)
        restarts = [0] * len(self._engines.members)
        while True:
            for rank, member in enumerate(self._engines.members):
                if member.missing:
                    continue
                with suppress(EngineDied):
                    stats = self._stats[rank] = await member.engine.stats()
                    self._report(rank, usage, stats)
                if restarts[rank] != member.num_restarts:
                    # Its first events came before Dynamo was connected again: those after a flush say all.
                    restarts[rank] = member.num_restarts
                    asyncio.get_running_loop().call_later(RENEWED_S, member.flush)
            await asyncio.sleep(EVERY_S)

    def _report(self, rank: int, usage: CacheUsage, stats: dict[str, float]) -> None:
        if self._publisher is None:
            return
        asked, hits = stats.get("prefix_queries"), sum(
            stats.get(f"prefix_{tier}_hits", 0.0) for tier in ("hbm", "dram", "disk"))
        self._publisher.publish(rank, ComponentSnapshot(
            kv_used_blocks=int(usage.used(stats)), kv_total_blocks=int(usage.pages(stats)),
            gpu_cache_usage=usage.share(stats), kv_cache_hit_rate=hits / asked if asked else None, dp_rank=rank))

    async def health_check_payload(self) -> dict[str, Any] | None:
        """A request of one token for an idle worker; a prefill worker answers none by itself."""
        first = self._text.eos_ids[0] if self._text.eos_ids else 0
        payload: dict[str, Any] | None = None if self._mode == "prefill" else build_health_check_payload(first)
        return payload

    def supported_controls(self) -> set[str]:
        return {"flush"}

    async def engine_control(self, control: str, body: dict[str, Any]) -> dict[str, Any]:
        """`flush`: forget cached pages that no request holds."""
        if control != "flush":
            return {"status": "error", "message": f"{control}: this worker has the control flush"}
        self._engines.flush()
        return {"status": "ok"}


def refusal(error: RequestError | EngineDied | Ended, *, alone: bool = True) -> Exception:
    """Return the same as an error of Dynamo's: whether the client, another worker or nothing can do better. alone:
    this worker has no other engine, so its end is the worker's, which Dynamo then leaves out."""
    kind: type[Exception] = Unknown
    if isinstance(error, RequestError):
        kind = InvalidArgument
    elif isinstance(error, EngineDied):
        kind = EngineShutdown if alone else WorkerUnavailable
    elif error.outcome in ("refused", "room_taken") or TOO_COMPLEX in error.reason:
        kind = InvalidArgument
    elif error.outcome == "abort" and not error.reason:
        kind = Cancelled
    return kind(str(error).splitlines()[0])


def served_name(config: Config, files: ModelFiles) -> str:
    """Return the model name that clients ask for."""
    return [*config.model.served_model_name, files.name][0]


def worker(config: Config, args: argparse.Namespace) -> tuple[Backend, WorkerConfig]:
    """Return the engine, not started, and how Dynamo registers it. Raises ConfigError."""
    pull(config, log.info)
    files = files_of(config.model)
    if files.gguf is not None or files.tokenizer is None:
        raise ConfigError(f"{config.model.model}: Dynamo's frontend reads config.json and tokenizer.json of the model: "
                          "give a folder or a hub id that has both")
    text = open_text(config, files)
    assert text.tokenizer is not None
    own_template = text.tokenizer.chat_template is not None or config.model.chat_template is not None
    mode = config.pair.disaggregation_mode
    return Backend(config, files, text), WorkerConfig(
        namespace=args.namespace, component=args.component or ("prefill" if mode == "prefill" else "backend"),
        endpoint=args.endpoint, model_name=str(files.folder), served_model_name=served_name(config, files),
        # Without a template the frontend would wait for one and never serve the model.
        endpoint_types="chat,completions" if own_template else "completions",
        discovery_backend=args.discovery_backend, request_plane=args.request_plane, event_plane=args.event_plane,
        custom_jinja_template=config.model.chat_template, tool_call_parser=args.dyn_tool_call_parser,
        reasoning_parser=args.dyn_reasoning_parser, disaggregation_mode=MODES[mode])


def serve(config: Config, args: argparse.Namespace) -> int:
    """Serve until a signal or the engine's death; the exit code. Raises ConfigError."""
    backend, settings = worker(config, args)
    try:
        uvloop.run(Worker(backend, settings).run())
    except Exception:                       # what `start` raises comes back from Rust as a bare one
        if backend.failed is None:
            raise
    if isinstance(backend.failed, ConfigError):
        raise backend.failed
    return 0 if backend.failed is None else 1


def _events(config: Config, folder: str) -> str:
    """Return --kv-events-config for a path that only this user can read."""
    media = ["GPU", "CPU", *(["STORAGE"] if config.kv.kv_storage is not None else [])]
    return msgspec.json.encode({"publisher": "zmq", "endpoint": f"ipc://{folder}/events", "media": media}).decode()
