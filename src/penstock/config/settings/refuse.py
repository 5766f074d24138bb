"""What does not work: values out of range and combinations, each with its reason.

The list is the honest measure of the project: it is generated into docs/flags.md, and it shrinks.
Flags of features that are not built at all are in `unbuilt.py`.
"""
from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from penstock.config.base.errors import ConfigError
from penstock.config.base.machine import Machine
from penstock.config.base.sizes import show_bytes
from penstock.config.base.storage_url import FORMS, masked, parse_storage
from penstock.config.request.selection import BOUNDS, BOUNDS_VERSION, SINKS, WINDOW, Selection
from penstock.config.settings.plain import object_of
from penstock.config.settings.tree import (
    DECODE_ENDS_MAX,
    SECRETS,
    Config,
    KVConfig,
    NodesConfig,
    PairConfig,
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
    if path == "kv.kv_storage" and isinstance(value, str):
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
    device = 0 if config.device.device == "cuda" else (config.kv.hbm_bytes or 0) * config.ranks_here
    wanted = device + (config.kv.dram_bytes or 0)
    return wanted * config.num_engines > machine.memory_available


def _budget_below_least(config: Config, _: Machine) -> bool:
    kv = config.kv
    if kv.sparse_top_k is None or kv.sparse_unit < 1:
        return False
    return kv.sparse_top_k < _least(kv.sparse_unit)


def _least(unit: int) -> int:
    return Selection(selector=BOUNDS, version=BOUNDS_VERSION, unit=unit, budget=0, sinks=SINKS,
                     window=WINDOW).least


def _leasts() -> str:
    return ", ".join(f"{_least(unit)} with units of {unit}" for unit in (4, 8, 16))


# What a captured step runs kernels of its own for.
_CAPTURED = frozenset(f"{op}=reference" for op in (
    "paged_attention", "write_kv", "select", "resolve", "gather", "sparse_attention"))


def _mode(config: Config) -> str:
    return config.pair.disaggregation_mode or ""


def _can_be_named(address: str) -> bool:
    """Whether another machine could dial it, as far as it shows; "" is of an end that does not listen."""
    return not address.startswith(("unix:", "0.0.0.0:", "[::]:"))


PAIR: tuple[Refusal[Machine], ...] = (
    Refusal(lambda c, _: (c.pair.prefill, c.pair.decode) != (0, 0)
            and not (1 <= c.pair.prefill <= 64 and 1 <= c.pair.decode <= DECODE_ENDS_MAX),
            ("pair.prefill", "pair.decode"),
            f"a pair has 1 to 64 and 1 to {DECODE_ENDS_MAX} of them: --prefill 1 --decode 1, or neither"),
    Refusal(lambda c, _: bool(c.pair.prefill and _mode(c)), ("pair.prefill", "pair.disaggregation_mode"),
            "the one starts both ends on this machine, the other one end: leave one of them out"),
    Refusal(lambda c, m: c.num_engines > 1 and c.device.device == "cuda" and c.kv.hbm_bytes is None
            and c.num_engines * c.ranks_here > len(m.gpus),
            ("server.dp", "pair.prefill", "kv.hbm_bytes"), "engines would take the same memory of a GPU that "
            "they share: give what each takes for KV, e.g. --hbm-bytes 8G, or have a GPU for each"),
    Refusal(lambda c, _: c.server.dp > 1 and bool(c.pair.prefill),
            ("server.dp", "pair.prefill", "pair.decode"),
            "--decode says how many engines there are at the address: leave --dp out"),
    Refusal(lambda c, _: c.server.dp > 1 and _mode(c) == "prefill", ("server.dp", "pair.disaggregation_mode"),
            "one engine listens at one address: start others with addresses of their own"),
    Refusal(lambda c, _: (c.pair.pair_listen is not None) != (_mode(c) == "prefill"),
            ("pair.disaggregation_mode", "pair.pair_listen"),
            "the prefill end listens, and only that: give it --pair-listen HOST:PORT"),
    Refusal(lambda c, _: bool(c.pair.pair_peer) != (_mode(c) == "decode") and not (
                _mode(c) == "decode" and c.is_routed),
            ("pair.disaggregation_mode", "pair.pair_peer"),
            "the decode end is told where the prefill end listens, and only that: give it "
            "--pair-peer HOST:PORT, or --router-dialect where a router tells it"),
    Refusal(lambda c, _: c.is_routed and not _can_be_named(c.pair.pair_listen or ""),
            ("server.router_dialect", "pair.pair_listen"),
            "a router tells decode ends where to connect: give --pair-listen an address of this machine, "
            "HOST:PORT"),
    Refusal(lambda c, _: bool(c.pair.pair_allow) and (
                not c.is_routed or _mode(c) != "decode" or bool(c.pair.pair_peer)),
            ("pair.pair_allow", "pair.pair_peer", "server.router_dialect"), "for a decode end that a router "
            "tells where to connect: give it --router-dialect, and no --pair-peer"),
    Refusal(lambda c, _: c.pair.pair_room_s != PairConfig().pair_room_s and not c.is_routed,
            ("pair.pair_room_s", "server.router_dialect"), "of one end of a pair behind a router: give "
            "--router-dialect and --disaggregation-mode as well"),
    Refusal(lambda c, _: not _mode(c) and any((c.pair.pair_key_file, c.pair.pair_tls, c.pair.pair_tls_cert,
                                              c.pair.pair_plaintext)),
            ("pair.disaggregation_mode", "pair.pair_key_file", "pair.pair_tls", "pair.pair_tls_cert",
             "pair.pair_plaintext"), "for one end of a pair: give --disaggregation-mode as well"),
    Refusal(lambda c, _: c.pair.pair_tls_cert is not None and _mode(c) == "decode",
            ("pair.pair_tls_cert", "pair.disaggregation_mode"),
            "the end that listens has the certificate: here give --pair-tls"),
    Refusal(lambda c, _: c.pair.pair_tls and _mode(c) == "prefill" and c.pair.pair_tls_cert is None,
            ("pair.pair_tls", "pair.pair_tls_cert"), "the end that listens needs a certificate"),
    Refusal(lambda c, _: c.pair.pair_plaintext and bool(c.pair.pair_tls or c.pair.pair_tls_cert),
            ("pair.pair_plaintext", "pair.pair_tls", "pair.pair_tls_cert"), "with TLS, or without: not both"),
    Refusal(lambda c, _: c.pair.disaggregation_transfer_backend != "stream" and not c.pair.prefill
            and not _mode(c), ("pair.disaggregation_transfer_backend",),
            "of a pair: give --disaggregation-mode, or --prefill and --decode, as well"),
    Refusal(lambda c, _: c.pair.disaggregation_transfer_backend != "stream"
            and bool(c.pair.pair_tls or c.pair.pair_tls_cert),
            ("pair.disaggregation_transfer_backend", "pair.pair_tls", "pair.pair_tls_cert"),
            "KV would go past TLS: on a network that is yours alone give --pair-plaintext, else leave the "
            "backend out"),
    Refusal(lambda c, _: c.pair.pair_fallback != "compute" and not c.pair.prefill and _mode(c) != "decode",
            ("pair.pair_fallback",), "of the decode end: there is no other here"),
    Refusal(lambda c, _: c.pair.pair_timeout_s != PairConfig().pair_timeout_s
            and not c.pair.prefill and _mode(c) != "decode",
            ("pair.pair_timeout_s",), "of the decode end, which waits: there is no other here"),
    Refusal(lambda c, _: c.pair.pair_silence_s != PairConfig().pair_silence_s
            and not c.pair.prefill and not _mode(c),
            ("pair.pair_silence_s",), "of a pair: there is no other engine here"),
    _outside("pair.pair_timeout_s", 0.1, 86400, "0.1 to 86400 seconds"),
    _outside("pair.pair_silence_s", 1, 3600, "1 to 3600 seconds"),
    _outside("pair.pair_room_s", 0.1, 3600, "0.1 to 3600 seconds"),
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
    nodes, stages, lanes = config.nodes.num, config.device.pp, config.device.tp
    return nodes > stages and (nodes % max(1, stages) > 0 or nodes > stages * lanes)


NODES: tuple[Refusal[Machine], ...] = (
    _outside("nodes.nnodes", 1, 256, "1 to 256 machines"),
    Refusal(lambda c, _: not 0 <= c.nodes.rank < max(1, c.nodes.num), ("nodes.node_rank", "nodes.nnodes"),
            "nodes are counted from 0: give --nnodes N, and each of them another of 0 to N-1"),
    Refusal(lambda c, _: c.nodes.num > 1 and c.nodes.dist_init_addr is None,
            ("nodes.nnodes", "nodes.dist_init_addr"),
            "where do they meet? give all of them --dist-init-addr HOST:PORT, an address of node 0"),
    Refusal(lambda c, _: c.nodes.num == 1 and any(
                _value(c, f"nodes.{name}") != getattr(NodesConfig(), name) for name in (
                    "dist_init_addr", "node_key_file", "node_tls_cert", "node_plaintext", "node_silence_s")),
            ("nodes.nnodes", "nodes.dist_init_addr", "nodes.node_key_file", "nodes.node_tls_cert",
             "nodes.node_plaintext", "nodes.node_silence_s"),
            "of several machines: give --nnodes N as well"),
    Refusal(lambda c, _: _no_ports(c), ("nodes.dist_init_addr",), "HOST:PORT is needed, a port of 1 to 65535 "
            "with one more behind it for each further engine, e.g. 10.0.0.1:20000"),
    Refusal(lambda c, _: _beyond(c) and c.nodes.node_tls_cert is None and not c.nodes.node_plaintext,
            ("nodes.dist_init_addr", "nodes.node_tls_cert", "nodes.node_plaintext"),
            "that is beyond this machine: give all nodes --node-tls-cert FILE, or --node-plaintext"),
    Refusal(lambda c, _: c.nodes.node_plaintext and c.nodes.node_tls_cert is not None,
            ("nodes.node_plaintext", "nodes.node_tls_cert"), "with TLS, or without: not both"),
    Refusal(lambda c, _: _beyond(c) and c.nodes.num > c.device.pp and c.nodes.node_tls_cert is not None,
            ("nodes.nnodes", "device.pp", "nodes.node_tls_cert"), "sums of lanes go from machine to machine "
            "without TLS, which gloo and NCCL do not have: take at least as many stages as nodes, which then "
            "have whole stages, or give --node-plaintext in place of the certificate"),
    Refusal(lambda c, _: _no_layout(c), ("nodes.nnodes", "device.pp", "device.tp"),
            "a node has whole stages, as even as it goes, or the lanes of one stage or some of them: at most "
            "as many nodes as stages, or a multiple of the stages, up to --pp times --tp"),
    _outside("nodes.node_silence_s", 1, 3600, "1 to 3600 seconds"),
)

REFUSED: tuple[Refusal[Machine], ...] = (
    _outside("model.max_model_len", 1, 1 << 24, "1 to 16777216 tokens"),
    _outside("model.seed", 0, 2**63 - 1, "0 to 9223372036854775807"),
    _outside("kv.page_size", 1, 256, "1 to 256 tokens per page"),
    _outside("kv.hbm_bytes", 1, 1 << 62, "at least 1 byte, or leave the flag out to measure"),
    _outside("kv.memory_fraction", 1e-6, 1.0, "above 0 and at most 1"),
    _outside("kv.dram_bytes", 0, 1 << 62, "0 turns the host tier off, else a size in bytes"),
    Refusal(_wants_more_than_all, ("kv.hbm_bytes", "kv.dram_bytes"),
            "together more than the {free} of memory that are free here{limit}"),
    _outside("kv.dram_ratio", 0.01, 1000, "0.01 to 1000 times the device pool"),
    Refusal(lambda c, _: c.kv.dram_bytes is not None and c.kv.dram_ratio is not None,
            ("kv.dram_bytes", "kv.dram_ratio"), "give the size of the host tier once"),
    Refusal(lambda c, _: c.kv.host_tier is True and c.kv.dram_bytes == 0, ("kv.host_tier", "kv.dram_bytes"),
            "0 turns the host tier off: give a size, or leave one of them out"),
    Refusal(lambda c, _: c.kv.host_tier is False and bool(c.kv.dram_bytes or c.kv.dram_ratio),
            ("kv.host_tier", "kv.dram_bytes", "kv.dram_ratio"), "a size is for a host tier: leave it out"),
    _outside("kv.sparse_top_k", 1, 1 << 24, "1 to 16777216 tokens, or leave the flag out to read all KV"),
    _outside("kv.sparse_unit", 4, 16, "4 to 16 tokens"),
    Refusal(lambda c, _: c.kv.state_interval is not None and 0 < c.kv.page_size
            and (c.kv.state_interval < 1 or c.kv.state_interval % c.kv.page_size != 0),
            ("kv.state_interval", "kv.page_size"), "a state is kept at the end of a page: take a multiple"),
    Refusal(lambda c, _: c.kv.sparse_top_k is not None and 0 < c.kv.sparse_unit
            and 0 < c.kv.page_size and c.kv.page_size % c.kv.sparse_unit != 0,
            ("kv.sparse_unit", "kv.page_size"), "a page holds whole units: take a unit that divides it"),
    Refusal(_budget_below_least, ("kv.sparse_top_k", "kv.sparse_unit"),
            f"a step always reads the first {SINKS} tokens and the last {WINDOW}, in whole units, and "
            f"selects at least one unit: at least {_leasts()} tokens"),
    Refusal(lambda c, _: not all(i.isascii() and i.isdigit() and len(i) < 6
                                 for i in c.kv.sparse_dense_layers),
            ("kv.sparse_dense_layers",), "numbers of layers, from 0, separated by commas"),
    Refusal(lambda c, _: bool(c.kv.sparse_dense_layers) and c.kv.sparse_top_k is None,
            ("kv.sparse_dense_layers", "kv.sparse_top_k"),
            "without a budget all layers read all of their KV"),
    _outside("kv.hot_buffer_tokens", 1, 1 << 24, "1 to 16777216 tokens"),
    Refusal(lambda c, _: (c.kv.hot_buffer_tokens or 1 << 30) < (c.kv.sparse_top_k or 0),
            ("kv.hot_buffer_tokens", "kv.sparse_top_k"), "it holds what one step reads: at least as many"),
    Refusal(lambda c, _: c.kv.hot_buffer_tokens is not None and c.kv.sparse_kv == "off",
            ("kv.hot_buffer_tokens", "kv.sparse_kv"),
            "no request has a hot buffer then: leave one of them out"),
    Refusal(lambda c, _: c.kv.hot_buffer_tokens is not None
            and (c.kv.dram_bytes == 0 or c.kv.host_tier is False),
            ("kv.hot_buffer_tokens", "kv.dram_bytes", "kv.host_tier"),
            "it is for host pages, and there is no host tier: give that a size, or leave this out"),
    Refusal(lambda c, _: c.kv.sparse_unit != KVConfig().sparse_unit and c.kv.sparse_top_k is None,
            ("kv.sparse_unit", "kv.sparse_top_k"), "without a budget nothing is selected: leave it out"),
    Refusal(lambda c, _: c.kv.sparse_kv == "always" and (c.kv.dram_bytes == 0 or c.kv.host_tier is False),
            ("kv.sparse_kv", "kv.dram_bytes", "kv.host_tier"), "host pages need a host tier: give it a size"),
    Refusal(lambda c, _: c.kv.kv_storage is not None and parse_storage(c.kv.kv_storage) is None,
            ("kv.kv_storage",), f"one of these is needed, paths absolute: {FORMS}"),
    Refusal(lambda c, _: c.kv.kv_storage is not None and (c.kv.dram_bytes == 0 or c.kv.host_tier is False),
            ("kv.kv_storage", "kv.dram_bytes", "kv.host_tier"),
            "stored pages go through the host tier: give that a size, or leave both out"),
    Refusal(lambda c, _: c.kv.kv_storage is not None and not c.kv.prefix_cache,
            ("kv.kv_storage", "kv.prefix_cache"), "what is stored is found as a prefix: leave one out"),
    *(_both(f"kv.{name}", "kv.kv_storage", lambda url: url is None,
            "of a storage: give one with --kv-storage file:///DIR")
      for name in ("kv_storage_bytes", "kv_storage_readonly", "kv_storage_key", "kv_storage_write_rate",
                   "kv_storage_sync", "kv_storage_policy", "kv_storage_write_policy")),
    *(_both(f"kv.{name}", "kv.kv_storage", _is_elsewhere, "of a folder: leave it out")
      for name in ("kv_storage_bytes", "kv_storage_sync")),
    *(_both(f"kv.{name}", "kv.kv_storage_readonly", bool, "nothing is stored then: leave one out")
      for name in ("kv_storage_bytes", "kv_storage_write_rate", "kv_storage_sync",
                   "kv_storage_write_policy")),
    _outside("kv.kv_storage_bytes", 1 << 20, 1 << 62, "at least 1MiB"),
    _outside("kv.kv_storage_write_rate", 1 << 20, 1 << 62, "at least 1MiB a second"),
    _outside("schedule.max_num_seqs", 1, 4096, "1 to 4096 rows"),
    _outside("schedule.step_tokens", 1, 1 << 20, "1 to 1048576 tokens a step"),
    _outside("schedule.max_waiting", 0, 1 << 20, "0 to 1048576 waiting requests"),
    _outside("schedule.speculative_tokens", 1, 15, "1 to 15 tokens; for none leave --speculative-method out"),
    _outside("schedule.prompt_lookup_min", 1, 16, "1 to 16 tokens"),
    Refusal(lambda c, _: not c.schedule.prompt_lookup_min <= c.schedule.prompt_lookup_max <= 16,
            ("schedule.prompt_lookup_max", "schedule.prompt_lookup_min"),
            "at least as many, and at most 16 tokens"),
    *(Refusal(lambda c, _, name=name, of=of: c.schedule.speculative_method not in of  # type: ignore[misc]
              and getattr(c.schedule, name) != getattr(ScheduleConfig(), name),
              (f"schedule.{name}", "schedule.speculative_method"),
              f"give --speculative-method {' or '.join(of)} as well")
      for name, of in (("speculative_tokens", ("ngram", "mtp", "eagle3")),
                       ("speculative_model", ("eagle3",)), ("prompt_lookup_min", ("ngram",)),
                       ("prompt_lookup_max", ("ngram",)))),
    Refusal(lambda c, _: c.schedule.speculative_method == "eagle3" and c.schedule.speculative_model is None,
            ("schedule.speculative_method", "schedule.speculative_model"), "name the folder of what drafts"),
    Refusal(lambda c, m: c.device.device == "cuda" and m.device != "cuda", ("device.device",),
            "{why}; take --device cpu"),
    Refusal(lambda c, _: c.device.device == "cuda" and c.device.cuda_graphs
            and not _CAPTURED.isdisjoint(c.device.backends), ("device.backends", "device.cuda_graphs"),
            "captured decode steps have kernels of their own, and references ask the host: take "
            "--no-cuda-graphs as well"),
    Refusal(lambda c, _: c.model.dtype == "gguf" and c.device.device == "cuda",
            ("model.dtype", "device.device"),
            "weights stay packed on a CPU only: take --device cpu, or --dtype bfloat16"),
    Refusal(lambda c, _: c.model.dtype == "gguf" and c.model.load_format == "dummy",
            ("model.dtype", "model.load_format"), "random weights are floats: leave one of them out"),
    Refusal(lambda c, _: c.model.dtype == "gguf" and any(
                b.startswith("linear=") and b not in ("linear=native", "linear=fastest")
                for b in c.device.backends), ("model.dtype", "device.backends"),
            "packed weights are multiplied by linear=native alone: leave one of them out"),
    Refusal(lambda c, m: c.device.cpu_isa == "avx2" and not {"avx2", "fma"} <= set(m.features),
            ("device.cpu_isa",), "this CPU has no AVX2 with FMA: leave it out, or take --cpu-isa plain"),
    Refusal(lambda c, _: c.device.cpu_isa != "native" and c.device.device == "cuda",
            ("device.cpu_isa", "device.device"), "it is about kernels of a CPU: take --device cpu"),
    _outside("device.threads", 1, 1024, "1 to 1024 threads"),
    _outside("device.pp", 1, 64, "1 to 64 stages"),
    _outside("device.tp", 1, 64, "1 to 64 lanes"),
    Refusal(lambda c, _: c.device.ep < 1 or (c.device.tp >= 1 and c.device.tp % c.device.ep > 0),
            ("device.ep", "device.tp"), "ranges of experts go over the lanes: a number that divides --tp"),
    Refusal(lambda c, _: c.device.expert_parallel and c.device.ep not in (1, c.device.tp),
            ("device.expert_parallel", "device.ep", "device.tp"),
            "that makes as many ranges as lanes: leave one of them out"),
    Refusal(lambda c, _: any(not n.isdecimal() or len(n) > 4 or int(n) < 1 for n in c.device.pp_layers)
            or len(c.device.pp_layers) not in (0, c.device.pp), ("device.pp_layers", "device.pp"),
            "one number of layers for each stage, at least 1, separated by commas"),
    _outside("device.rank_timeout_s", 1, 86400, "1 to 86400 seconds"),
    _outside("device.rank_silence_s", 2, 86400, "2 to 86400 seconds: a rank says each second that it lives"),
    _outside("device.gpu_layers", 0, 1 << 20, "all layers of the model, or 0 for the CPU"),
    Refusal(lambda c, _: c.device.gpu_layers == 0 and c.device.device == "cuda",
            ("device.gpu_layers", "device.device"), "no layer on the GPU is --device cpu: give one of them"),
    *map(_no_object, ("model.hf_overrides", "model.rope_scaling", "model.default_chat_template_kwargs",
                      "model.override_generation_config")),
    Refusal(lambda c, _: any(b.count("=") != 1 or "" in b.split("=") for b in c.device.backends),
            ("device.backends",), "written as OP=NAME, several separated by commas"),
    _outside("server.dp", 1, 64, "1 to 64 engines"),
    _outside("server.port", 0, 65535, "0 (any free port) to 65535"),
    Refusal(lambda c, _: not c.server.host, ("server.host",), "an address is needed"),
    Refusal(lambda c, _: is_public(c.server.host) and not c.server.api_key
            and not c.server.api_key_file, ("server.host", "server.api_key_file"),
            "other machines can reach this address: set --api-key-file, or bind 127.0.0.1"),
    Refusal(lambda c, _: c.server.api_key is not None and c.server.api_key_file is not None,
            ("server.api_key", "server.api_key_file"), "give the keys in one place"),
    Refusal(lambda c, _: c.server.api_key is not None and not c.server.api_key.strip(),
            ("server.api_key",), "is empty: leave the flag out to serve without a key"),
    Refusal(lambda c, _: (c.server.admin_key_file or c.server.admin_api_key) is not None
            and c.server.api_key is None
            and c.server.api_key_file is None, ("server.admin_key_file",),
            "without API keys every program of this machine is an admin: add --api-key-file"),
    Refusal(lambda c, _: not 0 <= c.server.log_stats_interval <= 86_400, ("server.log_stats_interval",),
            "0 to 86400 seconds; 0 logs no status"),
    Refusal(lambda c, _: c.server.ssl_keyfile is not None and c.server.ssl_certfile is None,
            ("server.ssl_keyfile", "server.ssl_certfile"), "a key is of a certificate: give both"),
    Refusal(lambda c, _: not all(map(_is_origin, c.server.cors_origins)), ("server.cors_origins",),
            "origins such as https://chat.example.com or http://localhost:3000, separated by commas, or *"),
    Refusal(lambda c, _: bool(c.server.cors_origins) and c.server.api_key is None
            and c.server.api_key_file is None
            and not all(is_local_origin(o) for o in c.server.cors_origins),
            ("server.cors_origins", "server.api_key_file"),
            "without API keys only pages of this machine may ask: add --api-key-file"),
    _outside("server.body_bytes_max", 1024, 1 << 30, "1KiB to 1GiB"),
    _outside("server.timeout_keep_alive", 1, 86_400, "1 to 86400 seconds"),
    _outside("server.drain_s", 0, 3600, "0 to 3600 seconds"),
    *PAIR,
    *NODES,
)


def refusals(config: Config, machine: Machine) -> list[str]:
    """Every reason why this config is refused, in the order of the list; empty when it is not."""
    return [r.text(config, machine) for r in REFUSED if r.when(config, machine)]


def check(config: Config, machine: Machine) -> None:
    """Raises ConfigError with every reason, one a line."""
    reasons = refusals(config, machine)
    if reasons:
        raise ConfigError("\n".join(reasons))
