"""`penstock serve`: the API process, from an empty socket to its exit code.

Owns the order of start and end: bind, start the engine, say ready, drain, exit. Knows signals and
processes; what is served is `http_app`'s. Does not import torch: the engine process does.
"""
from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import functools
import importlib.util
import logging
import os
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import uvicorn
import uvloop

from penstock.api import descriptors, logs, status
from penstock.api.app import Health, PeerView, build_app
from penstock.api.completions import OpenAI
from penstock.api.limits import Keys, LimitedProtocol, check_uvicorn, load_keys
from penstock.api.pd_router import routed_of
from penstock.config.base import collector
from penstock.config.base.errors import ConfigError, install_hint
from penstock.config.request.defaults import shown
from penstock.config.settings.kv_events import kv_events, shown_events
from penstock.config.settings.pairkey import read_secret
from penstock.config.settings.tree import Config, ServerConfig
from penstock.engine.client.client import EngineDied
from penstock.engine.client.dialect import CacheUsage
from penstock.engine.client.gate import Gate
from penstock.engine.client.local_pd import PairHere
from penstock.engine.client.metrics import Metrics
from penstock.engine.client.replicas import Engines, start_all, together
from penstock.memory.stores.secret import secret_for
from penstock.model.source.hub import pull
from penstock.model.weights.locate import ModelFiles, files_of
from penstock.text.encoder import Encoder
from penstock.text.helper import HelperDied
from penstock.text.model_text import ModelText, open_text

if TYPE_CHECKING:
    from penstock.engine.traces.spans import Traces

log = logging.getLogger("penstock.http")

EXIT_ENGINE_DIED = 1
EXIT_INTERRUPTED = 130
DYING_S = 5.0          # for open requests to hear that the engine is gone
DEAD_S = 1.0           # for new ones to hear it: a closed port says less
# Middle collections to a full one of the cycle collector, which takes 50 to 75 ms with 512 requests: one in
# 14,000 requests. Cycles of requests that a middle one has seen wait for it, 130 bytes a request.
FULL = 50
OTEL = "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"
CLOSING_S = 5          # for connections to close after the last answer


def run(config: Config | None, args: argparse.Namespace) -> int:
    """Serve until a signal or the engine's death; the exit code. Raises ConfigError."""
    assert config is not None, "the command line takes a MODEL"
    logs.set_up(config.server)
    pull(config, logs.info)
    if config.nodes.rank:
        from penstock.exec.pipeline.agent import run_agent  # imports torch, which this process does not
        run_agent(config)
    check_uvicorn()
    descriptors.raise_limit()
    tls = tls_of(config.server)
    secret, traces = secret_for(config.kv), _traces(config)
    keys = load_keys(config.server, secret)
    if keys.says:
        logs.info(keys.says)
    if len(keys) > 1 and kv_events(config.kv.kv_events_config) is not None:
        logs.info("warning: --kv-events-config publishes no page of one API key among several, and here every "
                  "request needs one")
    with bind(config.server) as listener, contextlib.closing(traces) if traces else contextlib.nullcontext():
        files = files_of(config.model)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_Server(config, files, keys, listener, secret, tls, traces).serve())


def bind(config: ServerConfig) -> socket.socket:
    """The public socket, bound and not yet listening: no client waits while the model loads.

    Raises ConfigError: the address is in use, or is not one of this machine's.
    """
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM,
                                   flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
    except OSError as e:
        raise _cannot_bind(config, e) from None
    return listener


def _cannot_bind(config: ServerConfig, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"port {config.port} on {config.host} is in use: stop what uses it, "
                           "choose another with --port, or let --port 0 take a free one")
    return ConfigError(f"cannot bind {config.host} port {config.port} ({error.strerror or error}): "
                       "give an address of this machine with --host, and a free --port")


def tls_of(config: ServerConfig, into: ssl.SSLContext | None = None) -> ssl.SSLContext | None:
    """What TLS is made with, where there is a certificate; `into`, for later connections, once it has been
    found to be right. Raises ConfigError."""
    if config.ssl_certfile is None:
        return None
    flag, key = ("--ssl-certfile", config.ssl_certfile) if config.ssl_keyfile is None else (
        "--ssl-keyfile", config.ssl_keyfile)
    read_secret(flag, key)
    found = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for context in (found, into):
        if context is not None:
            try:
                context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password="")
            except (OSError, ValueError) as e:
                raise ConfigError(f"--ssl-certfile {config.ssl_certfile}: {e}: give a PEM file with a "
                                  "certificate, and its key in it or with --ssl-keyfile") from None
    return into or found


def _traces(config: Config) -> Traces | None:
    """Return what makes spans; None: no requests are traced. Raises ConfigError."""
    endpoint = config.server.otlp_traces_endpoint
    if endpoint is None:
        return None
    for package in OTEL:
        if not _is_installed(package):
            raise ConfigError(f"--otlp-traces-endpoint: {package.replace('.', '-')} is not installed: "
                              f"{install_hint('otel')}")
    from penstock.engine.traces.spans import Traces
    return Traces(endpoint, config.pair.disaggregation_mode or "")


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:             # nor what it is in
        return False


def handled(*, reloads: bool) -> list[signal.Signals]:
    """The signals that a server acts on; SIGHUP is a closed terminal's. One that is ignored when this process
    starts stays so: `nohup` and shells without job control ask for that. reloads: SIGHUP ends nothing."""
    return [number for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
            if signal.getsignal(number) is not signal.SIG_IGN or (reloads and number == signal.SIGHUP)]


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers: draining comes before its own shutdown."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Server:
    """One run of the API process."""

    def __init__(self, config: Config, files: ModelFiles, keys: Keys,
                 listener: socket.socket, secret: bytes | None, tls: ssl.SSLContext | None,
                 traces: Traces | None) -> None:
        self._config, self._secret, self._tls, self._traces = config, secret, tls, traces
        traced = None if traces is None else traces.phases
        self._files = files
        self._keys = keys
        self._listener = listener
        self._health = Health()
        self._encoder: Encoder | None = None
        self._death: EngineDied | None = None
        self._stop = asyncio.Event()          # a signal, or the engine's death
        self._pair = PairHere(config, logs.info, traced) if config.pair.prefill_replicas else None
        decode = config if self._pair is None else self._pair.decode
        self._engine = Engines(decode, logs.info, self._on_death,
                               fds=() if self._pair is None else self._pair.fds, traced=traced)
        self._began = time.monotonic()

    async def serve(self) -> int:
        loop = asyncio.get_running_loop()
        for number in handled(reloads=self._tls is not None):
            loop.add_signal_handler(number, self._on_signal, number)
        text: ModelText | None = None
        try:
            starting = asyncio.create_task(self._start_engines())
            try:
                text = await asyncio.to_thread(self._open_text)
                if not await self._started(starting):
                    return 0
            finally:
                starting.cancel()
                await asyncio.wait([starting])
            return await self._serve(text)
        except EngineDied as e:
            if e is not self._death:              # which `_on_death` has printed
                _print_death(e)
            return EXIT_ENGINE_DIED
        except HelperDied as e:
            logs.error(str(e))
            return EXIT_ENGINE_DIED
        finally:
            if text is not None:
                text.close()
            if self._encoder is not None:
                self._encoder.close()
            await self._engine.close()
            if self._pair is not None:
                await self._pair.close()

    async def _start_engines(self) -> None:
        await start_all([*self._engine.members, *([] if self._pair is None else self._pair.prefill)])
        if self._pair is not None:
            await self._pair.joined(self._engine)

    async def _started(self, starting: asyncio.Task[Any]) -> bool:
        """Whether the engine is ready; False when a signal came first. Raises EngineDied or ConfigError."""
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait((starting, stop), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
        if starting.done():
            starting.result()
        if self._death is not None:               # which ends the wait before `starting` has failed by it
            raise self._death
        return starting.done() and not self._stop.is_set()

    def _open_text(self) -> ModelText:
        text = open_text(self._config, self._files)
        if text.tokenizer is None:
            log.warning("no tokenizer.json in %s: prompts are taken as token ids, answers given as such; "
                        "--tokenizer names another", self._files.folder)
        if text.sampling:
            log.info("requests that name none have the model's sampling values: %s (--generation-config "
                     "none leaves them out)", shown(text.sampling))
        if text.tokenizer is not None:
            self._encoder = Encoder(text.tokenizer)
        try:
            if text.template is not None:
                text.template.check()        # starts its process: not at the first chat's cost
            if text.grammars is not None and self._config.device.device == "cuda":
                text.grammars.begin()        # not on a CPU: memory is short, a step as long
        except HelperDied:
            raise
        except ConfigError as e:
            log.warning("%s; until then chats answer 400", e)
        return text

    async def _serve(self, text: ModelText) -> int:
        config = self._config
        schedule = config.schedule
        assert schedule.max_waiting is not None, "resolve fills it"
        model = [*config.model.served_model_name, self._files.name][0]
        metrics, info, page_size = Metrics(), self._engine.ready.info, self._engine.members[0].known("page_size")
        if config.server.metrics_dialect is not None:
            metrics.speak(config.server.metrics_dialect, model, page_size, CacheUsage.of(info))
        api = OpenAI(self._engine, text, metrics,
                     model=model,
                     encoder=self._encoder,
                     also=config.model.served_model_name,
                     unlisted=() if config.model.served_model_name else (config.model.model,),
                     choices_max=len(self._engine.members) * (schedule.max_num_seqs + schedule.max_waiting),
                     secret=self._secret, routed=routed_of(config, self._engine.ready),
                     clips=config.server.clip_max_tokens, is_admin=self._keys.is_admin,
                     turn_of=self._keys.turn_of, traces=self._traces,
                     cache_of=functools.partial(self._keys.cache_of,
                                                published=kv_events(config.kv.kv_events_config) is not None))
        app = build_app(api, self._health, self._keys, config.server,
                        {"model": api.model, "sampling_defaults": text.sampling,
                         "pid": self._engine.ready.pid, **info,
                         **shown_events(config.kv.kv_events_config, page_size, len(self._engine.members))},
                        [await m.engine.stats() for m in self._engine.members], self._peer_view())
        settings = uvicorn.Config(
            app, http=functools.partial(LimitedProtocol, gate=Gate(), connections=descriptors.Connections(
                descriptors.raise_limit(), api.metrics.refused.inc)),  # type: ignore[arg-type]
            ws="none", lifespan="off", log_config=None,
            access_log=logs.logs_access(config.server), server_header=False,
            timeout_keep_alive=config.server.timeout_keep_alive, timeout_graceful_shutdown=CLOSING_S)
        server = _Uvicorn(settings)
        settings.load()
        settings.ssl = self._tls
        try:
            self._listener.listen(2048)
        except OSError as e:                  # somebody else bound it too, and was faster
            raise _cannot_bind(config.server, e) from None
        collector.spare(FULL)
        print(self._ready_line(api.model), flush=True)
        serving = asyncio.create_task(server.serve(sockets=[self._listener]))
        reporting = asyncio.create_task(self._report(config.server.log_stats_interval))
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait((serving, stop), return_when=asyncio.FIRST_COMPLETED)
        await self._drain(api)
        reporting.cancel()
        server.should_exit = True
        await serving
        return EXIT_ENGINE_DIED if self._health.died else 0

    async def _report(self, interval_s: float) -> None:
        """Status lines, of prefill engines on this machine too."""
        here = () if self._pair is None else self._pair.prefill

        async def stats() -> dict[str, float]:
            found = together([await self._engine.stats(), *[await m.engine.stats() for m in here]])
            return found | {"requests_running": self._engine.num_running,
                            "requests_waiting": self._engine.num_waiting}

        if interval_s:
            await status.report(stats, interval_s)

    def _peer_view(self) -> PeerView | None:
        """The other instance of a disaggregated deployment, as routes show it."""
        mode = "decode" if self._pair is not None else self._config.pair.disaggregation_mode
        return None if mode is None else PeerView(
            self._engine, "prefill" if mode == "decode" else "decode",
            serves=mode == "decode" or self._config.is_routed,
            here=() if self._pair is None else self._pair.prefill)

    async def _drain(self, api: OpenAI) -> None:
        """Until no request is open, within the time that there is for it."""
        self._health.draining = api.draining = True
        if self._health.died:
            await asyncio.sleep(DEAD_S)
        limit_s = DYING_S if self._health.died else self._config.server.drain_s
        died = asyncio.create_task(self._died())
        idle = asyncio.create_task(api.idle.wait())
        await asyncio.wait((died, idle), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        died.cancel()
        idle.cancel()
        store_s = self._config.server.drain_store_s if self._config.kv.kv_storage is not None else 0.0
        if api.num_open or store_s:
            # Ends the streams that are open, each with an error that says so.
            await asyncio.gather(self._engine.close(store_s),
                                 *([] if self._pair is None else [self._pair.close(store_s)]))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(api.idle.wait(), DYING_S)

    async def _died(self) -> None:
        """The engine died while draining; open requests hear of it by their streams."""
        while not self._health.died:
            await asyncio.sleep(0.05)

    def _on_death(self, error: EngineDied) -> None:
        self._health.died, self._death = True, error
        _print_death(error)
        self._stop.set()

    def _on_signal(self, number: signal.Signals) -> None:
        if number == signal.SIGHUP and self._tls is not None:
            try:
                tls_of(self._config.server, self._tls)
                logs.info("certificate read again")
            except ConfigError as e:
                logs.info(f"the certificate stays as it was: {e}")
            return
        if self._stop.is_set() and number == signal.SIGINT:
            # The engine and the processes aside see their sockets close, and exit.
            os._exit(EXIT_INTERRUPTED)
        if not self._stop.is_set():
            self._stop.set()
            logs.info("stopping: open requests finish first; interrupt again to exit at once")

    def _ready_line(self, model: str) -> str:
        host, port = self._listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        parts = [f"model {model}"]
        members = self._engine.members
        if len(members) > 1:
            parts.append(f"{len(members)} engines")
        if "kv_bytes_per_request" in self._engine.ready.info:
            size = sum(m.known("hbm_bytes") for m in members)
            # Of the longest contexts: of a layer with a window a shorter one keeps as many.
            whole, longest = (members[0].known(name) for name in ("kv_bytes_per_request", "max_model_len"))
            tokens = int(size / whole * longest)
            parts.append(f"KV of {tokens:,} tokens in {size / (1 << 30):.2f} GiB")
            host = sum(m.known("dram_pages") * m.known("page_size") for m in members)
            if host:
                room = sum(m.known("dram_bytes") for m in members) / (1 << 30)
                parts.append(f"{host:,} tokens in {room:.2f} GiB of host memory")
            if stored := self._engine.ready.info.get("kv_storage"):
                parts.append(f"storage at {stored}")
        parts.append(f"started in {time.monotonic() - self._began:.1f} s")
        scheme = "http" if self._tls is None else "https"
        return f"penstock: ready on {scheme}://{shown}:{port} ({', '.join(parts)})"


def _print_death(error: EngineDied) -> None:
    # Its first line: the others are the engine's last ones, which were printed as they came.
    logs.error(str(error).splitlines()[0])
