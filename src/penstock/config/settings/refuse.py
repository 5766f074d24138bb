"""What does not work: values out of range and combinations, each with its reason.

The list is the honest measure of the project: docs/reference/flags.md has its length, and it shrinks.
Flags of features that are not built at all are in `unbuilt.py`.
"""
from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar
from urllib.parse import urlsplit

from penstock.config.base.errors import ConfigError
from penstock.config.base.machine import Machine
from penstock.config.base.sizes import show_bytes
from penstock.config.base.storage_url import FORMS, masked, parse_storage
from penstock.config.request.selection import BOUNDS, BOUNDS_VERSION, SINKS, WINDOW, Selection
from penstock.config.settings.kv_events import EVENTS_FORM, PORTS_FORM, KvEvents, is_wrong, kv_events
from penstock.config.settings.plain import object_of
from penstock.config.settings.tree import (
    DECODE_INSTANCES_MAX,
    SECRETS,
    Config,
    KVConfig,
    ScheduleConfig,
)


class Known(Protocol):
    """What is known beside the flags: the machine, or what a model's files say."""

    @property
    def words(self) -> Mapping[str, str]: ...


K = TypeVar("K", bound=Known)


@dataclass(frozen=True, slots=True)
class Refusal(Generic[K]):
    """`when` is true for a config that is refused; `fields` are named with their values. `why` may name the
    words of what is known."""

    when: Callable[[Config, K], bool]
    fields: tuple[str, ...]
    why: str

    def text(self, config: Config, known: K) -> str:
        """One line: what was given, then what is allowed or to do."""
        given = ", ".join(_shown(config, f) for f in self.fields)
        return f"{given}: {self.why.format_map(known.words)}"


def _value(config: Config, path: str) -> object:
    section, name = path.split(".")
    value: object = getattr(getattr(config, section), name)
    return value


def _shown(config: Config, path: str) -> str:
    flag, value = "--" + path.split(".")[1].replace("_", "-"), _value(config, path)
    if value is None or value == ():
        return f"no {flag}"
    if path in SECRETS:
        return flag
    if path in ("kv.kv_storage", "server.otlp_traces_endpoint") and isinstance(value, str):
        return f"{flag} {masked(value)}"
    if isinstance(value, bool):
        return flag if value else f"--no-{flag[2:]}"
    if isinstance(value, int) and path.endswith("_bytes"):
        return f"{flag} {show_bytes(value)}"
    return f"{flag} {','.join(value) if isinstance(value, tuple) else value}"


def _is_elsewhere(url: object) -> bool:
    """Whether pages are stored in no folder."""
    found = parse_storage(url) if isinstance(url, str) else None
    return found is not None and found.folder is None


def _events(config: Config) -> KvEvents | None:
    """KV events that are published, None as well where the text is wrong."""
    text = config.kv.kv_events_config
    return None if is_wrong(text) else kv_events(text)


def _publishes(config: Config, medium: str) -> bool:
    """Whether KV events of pages in this medium are published."""
    events = _events(config)
    return events is not None and medium in events.media


def _is_http_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return (parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
                and "@" not in parts.netloc)
    except ValueError:
        return False


def _both(path: str, other: str, wrong: Callable[[object], bool], why: str) -> Refusal[Machine]:
    """Refuses a flag of KV that is given where another has a value that is `wrong` with it."""
    default = getattr(KVConfig(), path.split(".")[1])
    return Refusal(lambda c, _: _value(c, path) != default and wrong(_value(c, other)), (path, other), why)


def _outside(path: str, low: float, high: float, why: str) -> Refusal[Machine]:
    """Refuses a number under `low` or over `high`; None is inside. NaN is outside."""
    def when(config: Config, _: Machine) -> bool:
        value = _value(config, path)
        return isinstance(value, int | float) and not low <= value <= high
    return Refusal(when, (path,), why)


def _no_object(path: str) -> Refusal[Machine]:
    """Refuses a text that is no JSON object."""
    def when(config: Config, _: Machine) -> bool:
        text = _value(config, path)
        return isinstance(text, str) and object_of(text) is None
    return Refusal(when, (path,), "a JSON object is needed")


def is_public(host: str) -> bool:
    """Whether a bind to `host` can be reached from another machine."""
    if host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return True


_HOST = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")


def is_local(host: str) -> bool:
    """Whether a Host header, with or without a port, names this machine as a server without keys can
    be bound: localhost or a loopback address."""
    found = _HOST.fullmatch(host)
    return found is not None and not is_public(found[1].strip("[]").lower())


def is_local_origin(origin: str) -> bool:
    """`is_local` of an Origin header. "null", which sandboxed pages send, is not."""
    scheme, _, host = origin.partition("://")
    return scheme in ("http", "https") and is_local(host)


def _is_origin(origin: str) -> bool:
    scheme, _, host = origin.partition("://")
    return origin == "*" or (scheme in ("http", "https") and _HOST.fullmatch(host) is not None)


def _wants_more_than_all(config: Config, machine: Machine) -> bool:
    device = 0 if config.device.device == "cuda" else (config.kv.kv_cache_memory_bytes or 0) * config.ranks_here
    wanted = device + (config.kv.host_bytes or 0)
    return wanted * config.num_engines > machine.memory_available


def _budget_below_least(config: Config, _: Machine) -> bool:
    kv = config.kv
    if kv.sparse_top_k is None or kv.sparse_block_size < 1:
        return False
    return kv.sparse_top_k < _least(kv.sparse_block_size)


def _least(unit: int) -> int:
    return Selection(selector=BOUNDS, version=BOUNDS_VERSION, unit=unit, budget=0, sinks=SINKS,
                     window=WINDOW).least


def _leasts() -> str:
    return ", ".join(f"{_least(unit)} with blocks of {unit}" for unit in (4, 8, 16))


# What a captured step runs kernels of its own for.
_CAPTURED = frozenset(f"{op}=reference" for op in (
    "paged_attention", "write_kv", "select", "resolve", "gather", "sparse_attention"))


def _mode(config: Config) -> str:
    return config.pair.disaggregation_mode or ""


def _can_be_named(address: str) -> bool:
    """Return whether another machine could connect to it, as far as the text shows; "" is no address."""
    return not address.startswith(("unix:", "0.0.0.0:", "[::]:"))


def _not_decoding(config: Config) -> bool:
    return not config.pair.prefill_replicas and _mode(config) != "decode"


PAIR: tuple[Refusal[Machine], ...] = (
    Refusal(lambda c, _: (c.pair.prefill_replicas, c.pair.decode_replicas) != (0, 0)
            and not (1 <= c.pair.prefill_replicas <= 64
                     and 1 <= c.pair.decode_replicas <= DECODE_INSTANCES_MAX),
            ("pair.prefill_replicas", "pair.decode_replicas"),
            f"give both, 1 to 64 prefill and 1 to {DECODE_INSTANCES_MAX} decode instances, or neither"),
    Refusal(lambda c, _: bool(c.pair.prefill_replicas and _mode(c)),
            ("pair.prefill_replicas", "pair.disaggregation_mode"),
            "the first starts all instances on this machine, the second makes this engine one instance: give one "
            "of them"),
    Refusal(lambda c, m: c.num_engines > 1 and c.device.device == "cuda"
            and c.kv.kv_cache_memory_bytes is None and c.num_engines * c.ranks_here > len(m.gpus),
            ("device.dp", "pair.prefill_replicas", "kv.kv_cache_memory_bytes"),
            "several engines share a GPU: give each a fixed size for KV, e.g. --kv-cache-memory-bytes 8G, or one "
            "GPU per engine"),
    Refusal(lambda c, _: c.device.dp > 1 and bool(c.pair.prefill_replicas),
            ("device.dp", "pair.prefill_replicas", "pair.decode_replicas"),
            "--decode-replicas sets the number of engines at this address: leave --dp out"),
    Refusal(lambda c, _: c.device.dp > 1 and _mode(c) == "prefill", ("device.dp", "pair.disaggregation_mode"),
            "one prefill instance listens at one address: start further instances with addresses of their own"),
    Refusal(lambda c, _: (c.pair.disaggregation_listen is not None) != (_mode(c) == "prefill"),
            ("pair.disaggregation_mode", "pair.disaggregation_listen"),
            "a prefill instance listens, and only a prefill instance: give it --disaggregation-listen HOST:PORT"),
    Refusal(lambda c, _: bool(c.pair.disaggregation_connect) != (_mode(c) == "decode") and not (
                _mode(c) == "decode" and c.is_routed),
            ("pair.disaggregation_mode", "pair.disaggregation_connect"),
            "a decode instance connects, and only a decode instance: give it --disaggregation-connect HOST:PORT, "
            "or --router-dialect if a router names the prefill instances"),
    Refusal(lambda c, _: c.is_routed and not _can_be_named(c.pair.disaggregation_listen or ""),
            ("server.router_dialect", "pair.disaggregation_listen"),
            "a router names this address to decode instances: give --disaggregation-listen an address of this "
            "machine, HOST:PORT"),
    Refusal(lambda c, _: bool(c.pair.disaggregation_allow) and (
                not c.is_routed or _mode(c) != "decode" or bool(c.pair.disaggregation_connect)),
            ("pair.disaggregation_allow", "pair.disaggregation_connect", "server.router_dialect"),
            "limits which prefill instances a router may name: give a decode instance --router-dialect, and no "
            "--disaggregation-connect"),
    Refusal(lambda c, _: c.pair.disaggregation_transfer_backend != "stream" and not c.pair.prefill_replicas
            and not _mode(c), ("pair.disaggregation_transfer_backend",),
            "applies to PD disaggregation: also give --disaggregation-mode, or --prefill-replicas and "
            "--decode-replicas"),
    Refusal(lambda c, _: c.pair.disaggregation_transfer_backend != "stream" and bool(_mode(c))
            and bool(c.cluster.cluster_tls or c.cluster.cluster_tls_cert),
            ("pair.disaggregation_transfer_backend", "cluster.cluster_tls", "cluster.cluster_tls_cert"),
            "this back-end sends KV without TLS: on a private network give --cluster-insecure, else leave the "
            "back-end out"),
    Refusal(lambda c, _: c.pair.disaggregation_fallback != "compute" and _not_decoding(c),
            ("pair.disaggregation_fallback",), "applies to a decode instance: leave it out"),
    Refusal(lambda c, _: c.pair.disaggregation_timeout_s is not None and _not_decoding(c) and not c.is_routed,
            ("pair.disaggregation_timeout_s",),
            "applies to a decode instance, and to a prefill instance with --router-dialect: leave it out"),
    _outside("pair.disaggregation_timeout_s", 0.1, 86400, "0.1 to 86400 seconds"),
)

_ADDRESS = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})")


def _beyond(config: Config) -> bool:
    """Whether nodes are on several machines, or node 0 listens where others could be."""
    found = _ADDRESS.fullmatch(config.nodes.dist_init_addr or "")
    return config.nodes.num > 1 and found is not None and is_public(found[1].strip("[]"))


def _no_ports(config: Config) -> bool:
    address = config.nodes.dist_init_addr
    found = None if address is None else _ADDRESS.fullmatch(address)
    return address is not None and not (
        found and 0 < int(found[2]) <= (1 << 16) - max(1, config.num_engines))


def _no_layout(config: Config) -> bool:
    """Nodes have whole stages, or as many nodes each stage between them."""
    nodes, stages, ranks = config.nodes.num, config.device.pp, config.device.tp
    return nodes > stages and (nodes % max(1, stages) > 0 or nodes > stages * ranks)


NODES: tuple[Refusal[Machine], ...] = (
    _outside("nodes.nnodes", 1, 256, "1 to 256 machines"),
    Refusal(lambda c, _: not 0 <= c.nodes.rank < max(1, c.nodes.num), ("nodes.node_rank", "nodes.nnodes"),
            "give --nnodes N, and each machine another number from 0 to N-1"),
    Refusal(lambda c, _: c.nodes.num > 1 and c.nodes.dist_init_addr is None,
            ("nodes.nnodes", "nodes.dist_init_addr"),
            "give all machines --dist-init-addr HOST:PORT, an address of machine 0"),
    Refusal(lambda c, _: c.nodes.num == 1 and c.nodes.dist_init_addr is not None,
            ("nodes.nnodes", "nodes.dist_init_addr"), "applies to several machines: also give --nnodes N"),
    Refusal(lambda c, _: _no_ports(c), ("nodes.dist_init_addr",), "HOST:PORT is needed, with a port from 1 to "
            "65535 and one more port for each further engine, e.g. 10.0.0.1:20000"),
    Refusal(lambda c, _: _beyond(c) and c.cluster.cluster_tls_cert is None and not c.cluster.cluster_insecure,
            ("nodes.dist_init_addr", "cluster.cluster_tls_cert", "cluster.cluster_insecure"),
            "other machines can reach this address: give all machines --cluster-tls-cert FILE, or "
            "--cluster-insecure"),
    Refusal(lambda c, _: _beyond(c) and c.nodes.num > c.device.pp and c.cluster.cluster_tls_cert is not None,
            ("nodes.nnodes", "device.pp", "cluster.cluster_tls_cert"), "one stage would span machines, and the "
            "all-reduce of its TP ranks (gloo, NCCL) has no TLS: take at least as many stages as machines, or "
            "--cluster-insecure and no certificate"),
    Refusal(lambda c, _: _no_layout(c), ("nodes.nnodes", "device.pp", "device.tp"),
            "each machine has whole pipeline stages, or TP ranks of one stage: take at most as many machines as "
            "stages, or a multiple of the stages up to --pp times --tp"),
)


CLUSTER: tuple[Refusal[Machine], ...] = (
    Refusal(lambda c, _: c.cluster.is_given and not _mode(c) and c.nodes.num == 1,
            ("cluster.cluster_key_file", "cluster.cluster_tls", "cluster.cluster_tls_cert",
             "cluster.cluster_insecure"),
            "apply between instances or machines: also give --disaggregation-mode, or --nnodes N"),
    Refusal(lambda c, _: c.cluster.cluster_tls_cert is not None and _mode(c) == "decode" and c.nodes.num == 1,
            ("cluster.cluster_tls_cert", "pair.disaggregation_mode"),
            "the prefill instance has the certificate: give this decode instance --cluster-tls"),
    Refusal(lambda c, _: c.cluster.cluster_tls and _mode(c) == "prefill" and c.cluster.cluster_tls_cert is None,
            ("cluster.cluster_tls", "cluster.cluster_tls_cert"), "a prefill instance needs a certificate"),
    Refusal(lambda c, _: c.cluster.cluster_tls and _mode(c) == "", ("cluster.cluster_tls",),
            "applies to a decode instance; between machines give all of them --cluster-tls-cert FILE"),
    Refusal(lambda c, _: c.cluster.cluster_insecure and bool(c.cluster.cluster_tls
                                                             or c.cluster.cluster_tls_cert),
            ("cluster.cluster_insecure", "cluster.cluster_tls", "cluster.cluster_tls_cert"),
            "these exclude each other: give one"),
    _outside("cluster.heartbeat_timeout_s", 1, 86400, "1 to 86400 seconds"),
)

REFUSED: tuple[Refusal[Machine], ...] = (
    _outside("model.max_model_len", 1, 1 << 24, "1 to 16777216 tokens"),
    _outside("model.seed", 0, 2**63 - 1, "0 to 9223372036854775807"),
    _outside("kv.page_size", 1, 256, "1 to 256 tokens per page"),
    _outside("kv.kv_cache_memory_bytes", 1, 1 << 62, "at least 1 byte, or leave the flag out to measure"),
    _outside("kv.gpu_memory_utilization", 1e-6, 1.0, "above 0 and at most 1"),
    Refusal(_wants_more_than_all, ("kv.kv_cache_memory_bytes", "kv.kv_offloading_size"),
            "together more than the {free} of memory that are free here{limit}"),
    Refusal(lambda c, _: c.kv.host_ratio is not None and not 0.01 <= c.kv.host_ratio <= 1000,
            ("kv.kv_offloading_size",), "0.01x to 1000x the KV cache on the device"),
    _outside("kv.sparse_top_k", 1, 1 << 24, "1 to 16777216 tokens, or leave the flag out to read all KV"),
    _outside("kv.sparse_block_size", 4, 16, "4 to 16 tokens"),
    Refusal(lambda c, _: c.kv.state_interval is not None and 0 < c.kv.page_tokens()
            and (c.kv.state_interval < 1 or c.kv.state_interval % c.kv.page_tokens() != 0),
            ("kv.state_interval", "kv.page_size"), "states are cached at page ends: take a multiple of the page size"),
    Refusal(lambda c, _: 0 < c.kv.page_tokens()
            and (c.kv.window_interval < 0 or c.kv.window_interval % c.kv.page_tokens() != 0),
            ("kv.window_interval", "kv.page_size"), "windows end with pages: take a multiple of the page size, or 0"),
    Refusal(lambda c, _: c.kv.sparse_top_k is not None and 0 < c.kv.sparse_block_size
            and 0 < c.kv.page_tokens() and c.kv.page_tokens() % c.kv.sparse_block_size != 0,
            ("kv.sparse_block_size", "kv.page_size"), "a page holds whole blocks: take a divisor of the page size"),
    Refusal(_budget_below_least, ("kv.sparse_top_k", "kv.sparse_block_size"),
            f"a step always reads the first {SINKS} and the last {WINDOW} tokens, in whole blocks, and selects at "
            f"least one more: at least {_leasts()} tokens"),
    Refusal(lambda c, _: not all(i.isascii() and i.isdigit() and len(i) < 6
                                 for i in c.kv.sparse_dense_layers),
            ("kv.sparse_dense_layers",), "layer numbers from 0, separated by commas"),
    Refusal(lambda c, _: bool(c.kv.sparse_dense_layers) and c.kv.sparse_top_k is None,
            ("kv.sparse_dense_layers", "kv.sparse_top_k"),
            "without --sparse-top-k every layer reads all of its KV: leave it out"),
    _outside("kv.hot_buffer_tokens", 1, 1 << 24, "1 to 16777216 tokens"),
    Refusal(lambda c, _: (c.kv.hot_buffer_tokens or 1 << 30) < (c.kv.sparse_top_k or 0),
            ("kv.hot_buffer_tokens", "kv.sparse_top_k"),
            "the hot buffer holds what one step reads: take at least as many tokens"),
    Refusal(lambda c, _: c.kv.hot_buffer_tokens is not None and c.kv.host_decode == "off",
            ("kv.hot_buffer_tokens", "kv.host_decode"),
            "without decode from host memory there is no hot buffer: leave one of them out"),
    Refusal(lambda c, _: c.kv.hot_buffer_tokens is not None
            and c.kv.host_tier is False,
            ("kv.hot_buffer_tokens", "kv.kv_offloading_size"),
            "a hot buffer serves KV in host memory: give --kv-offloading-size, or leave this out"),
    Refusal(lambda c, _: c.kv.sparse_block_size != KVConfig().sparse_block_size and c.kv.sparse_top_k is None,
            ("kv.sparse_block_size", "kv.sparse_top_k"), "applies with --sparse-top-k: leave it out"),
    Refusal(lambda c, _: c.kv.host_decode == "always" and c.kv.host_tier is False,
            ("kv.host_decode", "kv.kv_offloading_size"), "decode from host memory needs a host tier: give it a size"),
    Refusal(lambda c, _: c.kv.kv_storage is not None and parse_storage(c.kv.kv_storage) is None,
            ("kv.kv_storage",), f"one of these is needed, paths absolute: {FORMS}"),
    Refusal(lambda c, _: c.kv.kv_storage is not None and c.kv.host_tier is False,
            ("kv.kv_storage", "kv.kv_offloading_size"),
            "pages reach storage through the host tier: give it a size, or leave both out"),
    Refusal(lambda c, _: c.kv.kv_storage is not None and not c.kv.prefix_cache,
            ("kv.kv_storage", "kv.prefix_cache"), "stored pages are found by the prefix cache: leave one of them out"),
    _outside("kv.retained_share", 0, 1, "0 to 1"),
    Refusal(lambda c, _: c.kv.retained_share > 0 and not c.kv.prefix_cache, ("kv.retained_share", "kv.prefix_cache"),
            "sessions retain what the prefix cache has: leave one of them out"),
    Refusal(lambda c, _: c.kv.window_interval > 0 and not c.kv.prefix_cache, ("kv.window_interval", "kv.prefix_cache"),
            "the interval is that of the prefix cache: leave one of them out"),
    *(_both(f"kv.{name}", "kv.kv_storage", lambda url: url is None,
            "applies to storage: also give --kv-storage file:///DIR")
      for name in ("kv_storage_bytes", "kv_storage_key", "kv_storage_policy", "kv_storage_write_policy")),
    _both("kv.kv_storage_bytes", "kv.kv_storage", _is_elsewhere, "applies to a folder: leave it out"),
    _both("kv.kv_storage_bytes", "kv.kv_storage_write_policy", lambda policy: policy == "none",
          "nothing is stored then: leave one of them out"),
    _outside("kv.kv_storage_bytes", 1 << 20, 1 << 62, "at least 1MiB"),
    Refusal(lambda c, _: is_wrong(c.kv.kv_events_config), ("kv.kv_events_config",), EVENTS_FORM),
    Refusal(lambda c, _: _publishes(c, "GPU") and not c.kv.prefix_cache, ("kv.kv_events_config", "kv.prefix_cache"),
            "events say what the prefix cache has: leave one of them out"),
    Refusal(lambda c, _: _publishes(c, "STORAGE") and c.kv.kv_storage is None,
            ("kv.kv_events_config", "kv.kv_storage"), "without storage there is no medium STORAGE: leave it out"),
    Refusal(lambda c, _: (events := _events(c)) is not None
            and not events.has_room(c.pair.decode_replicas or c.device.dp), ("kv.kv_events_config", "device.dp"),
            PORTS_FORM),
    Refusal(lambda c, _: (url := c.server.otlp_traces_endpoint) is not None and not _is_http_url(url),
            ("server.otlp_traces_endpoint",),
            "the OTLP/HTTP address of a collector is needed, such as http://localhost:4318/v1/traces; secrets go into "
            "OTEL_EXPORTER_OTLP_HEADERS"),
    _outside("schedule.max_num_seqs", 1, 4096, "1 to 4096 requests"),
    _outside("schedule.max_num_batched_tokens", 1, 1 << 20, "1 to 1048576 tokens a step"),
    _outside("schedule.max_waiting", 0, 1 << 20, "0 to 1048576 waiting requests"),
    _outside("schedule.speculative_tokens", 1, 15, "1 to 15 tokens; for none leave --speculative-method out"),
    _outside("schedule.prompt_lookup_min", 1, 16, "1 to 16 tokens"),
    Refusal(lambda c, _: not c.schedule.prompt_lookup_min <= c.schedule.prompt_lookup_max <= 16,
            ("schedule.prompt_lookup_max", "schedule.prompt_lookup_min"),
            "at least --prompt-lookup-min, at most 16 tokens"),
    *(Refusal(lambda c, _, name=name, of=of: c.schedule.speculative_method not in of  # type: ignore[misc]
              and getattr(c.schedule, name) != getattr(ScheduleConfig(), name),
              (f"schedule.{name}", "schedule.speculative_method"),
              f"give --speculative-method {' or '.join(of)} as well")
      for name, of in (("speculative_tokens", ("ngram", "mtp", "eagle3")),
                       ("speculative_model", ("eagle3",)), ("prompt_lookup_min", ("ngram",)),
                       ("prompt_lookup_max", ("ngram",)))),
    Refusal(lambda c, _: c.schedule.speculative_method == "eagle3" and c.schedule.speculative_model is None,
            ("schedule.speculative_method", "schedule.speculative_model"),
            "give --speculative-model FOLDER, the draft layer"),
    Refusal(lambda c, m: c.device.device == "cuda" and m.device != "cuda", ("device.device",),
            "{why}; take --device cpu"),
    Refusal(lambda c, _: c.device.device == "cuda" and c.device.cuda_graphs
            and not _CAPTURED.isdisjoint(c.device.backends), ("device.backends", "device.cuda_graphs"),
            "CUDA graphs cannot contain the reference of these operations: also give --no-cuda-graphs"),
    Refusal(lambda c, _: c.model.dtype == "gguf" and c.model.load_format == "dummy",
            ("model.dtype", "model.load_format"), "dummy weights are not quantised: leave one of them out"),
    Refusal(lambda c, _: c.model.dtype == "gguf" and any(
                b.startswith("linear=") and b not in ("linear=c", "linear=native", "linear=fastest")
                for b in c.device.backends) and c.device.device != "cuda", ("model.dtype", "device.backends"),
            "on a CPU only linear=c multiplies quantised weights: leave one of them out"),
    Refusal(lambda c, m: c.device.debug_cpu_isa == "avx2" and not {"avx2", "fma"} <= set(m.features),
            ("device.debug_cpu_isa",), "this CPU has no AVX2 with FMA: leave it out, or take --debug-cpu-isa plain"),
    Refusal(lambda c, _: c.device.debug_cpu_isa != "native" and c.device.device == "cuda",
            ("device.debug_cpu_isa", "device.device"), "applies to CPU kernels: take --device cpu"),
    _outside("device.threads", 1, 1024, "1 to 1024 threads"),
    _outside("device.pp", 1, 64, "1 to 64 stages"),
    _outside("device.pp_together", 1, 1 << 20, "1 request or more"),
    _outside("device.tp", 1, 64, "1 to 64 TP ranks"),
    Refusal(lambda c, _: c.device.ep < 0 or (c.device.tp >= 1 and c.device.tp % c.device.expert_ranges > 0),
            ("device.ep", "device.tp"), "expert groups are spread over the TP ranks: take a divisor of --tp, or 0"),
    Refusal(lambda c, _: any(not n.isdecimal() or len(n) > 4 or int(n) < 1 for n in c.device.pp_layers)
            or len(c.device.pp_layers) not in (0, c.device.pp), ("device.pp_layers", "device.pp"),
            "one number of layers for each stage, at least 1, separated by commas"),
    _outside("device.step_timeout_s", 1, 86400, "1 to 86400 seconds"),
    _outside("device.gpu_layers", 0, 1 << 20, "all layers of the model, or 0 for the CPU"),
    Refusal(lambda c, _: c.device.gpu_layers == 0 and c.device.device == "cuda",
            ("device.gpu_layers", "device.device"), "0 layers on the GPU means --device cpu: give one of them"),
    *map(_no_object, ("model.hf_overrides", "model.default_chat_template_kwargs",
                      "model.override_generation_config")),
    Refusal(lambda c, _: any(b.count("=") != 1 or "" in b.split("=") for b in c.device.backends),
            ("device.backends",), "written as OP=NAME, several separated by commas"),
    _outside("device.dp", 1, 64, "1 to 64 engines"),
    _outside("server.port", 0, 65535, "0 (any free port) to 65535"),
    Refusal(lambda c, _: not c.server.host, ("server.host",), "an address is needed"),
    Refusal(lambda c, _: is_public(c.server.host) and not c.server.api_key
            and not c.server.api_key_file, ("server.host", "server.api_key_file"),
            "other machines can reach this address: also give --api-key-file, or bind 127.0.0.1"),
    Refusal(lambda c, _: c.server.api_key is not None and c.server.api_key_file is not None,
            ("server.api_key", "server.api_key_file"), "give the keys once"),
    Refusal(lambda c, _: c.server.api_key is not None and not c.server.api_key.strip(),
            ("server.api_key",), "is empty: leave the flag out to serve without a key"),
    Refusal(lambda c, _: (c.server.admin_key_file or c.server.admin_api_key) is not None
            and c.server.api_key is None
            and c.server.api_key_file is None, ("server.admin_key_file",),
            "without API keys every local program is an admin: also give --api-key-file"),
    Refusal(lambda c, _: not 0 <= c.server.log_stats_interval <= 86_400, ("server.log_stats_interval",),
            "0 to 86400 seconds; 0 logs no status"),
    Refusal(lambda c, _: c.server.ssl_keyfile is not None and c.server.ssl_certfile is None,
            ("server.ssl_keyfile", "server.ssl_certfile"), "the key belongs to a certificate: give both"),
    Refusal(lambda c, _: not all(map(_is_origin, c.server.cors_origins)), ("server.cors_origins",),
            "origins such as https://chat.example.com or http://localhost:3000, separated by commas, or *"),
    Refusal(lambda c, _: bool(c.server.cors_origins) and c.server.api_key is None
            and c.server.api_key_file is None
            and not all(is_local_origin(o) for o in c.server.cors_origins),
            ("server.cors_origins", "server.api_key_file"),
            "without API keys only local pages may send requests: also give --api-key-file"),
    _outside("server.body_bytes_max", 1024, 1 << 30, "1KiB to 1GiB"),
    _outside("server.timeout_keep_alive", 1, 86_400, "1 to 86400 seconds"),
    _outside("server.drain_s", 0, 3600, "0 to 3600 seconds"),
    _outside("server.drain_store_s", 0, 3600, "0 to 3600 seconds"),
    Refusal(lambda c, _: c.server.ready_needs_prefill and not c.pair.prefill_replicas
            and not (c.pair.disaggregation_mode == "decode" and c.pair.disaggregation_connect),
            ("server.ready_needs_prefill", "pair.disaggregation_mode", "pair.disaggregation_connect"),
            "only a decode instance that knows its prefill instances waits for one: leave it out, or give "
            "--disaggregation-connect"),
    *PAIR,
    *NODES,
    *CLUSTER,
)


def refusals(config: Config, machine: Machine) -> list[str]:
    """Every reason why this config is refused, in the order of the list; empty when it is not."""
    return [r.text(config, machine) for r in REFUSED if r.when(config, machine)]


def check(config: Config, machine: Machine) -> None:
    """Raises ConfigError with every reason, one a line."""
    reasons = refusals(config, machine)
    if reasons:
        raise ConfigError("\n".join(reasons))
