"""Prometheus metrics: counters and histograms of the API process, gauges and counters of its engines.

Owns the names. Knows no request content: labels are finish reasons, tiers and directions only.
"""
from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from penstock.engine.client.dialect import CacheUsage, Dialect
from penstock.engine.client.metric_help import HELP

# No `_created` line per metric: scrapers do not use it.
disable_created_metrics()  # type: ignore[no-untyped-call]
PREFIX = "penstock:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TTFT_S = (.005, .01, .02, .05, .1, .2, .5, 1, 2, 5, 10, 30, 60, 120, 300)
_ITL_S = (.002, .005, .01, .02, .03, .05, .075, .1, .15, .2, .3, .5, 1, 2, 5, 10)
_E2E_S = (.05, .1, .2, .5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800)
_TOKENS = tuple(float(4**n) for n in range(11))         # to 1,048,576
_NAME = re.compile(r"^([a-zA-Z_][a-zA-Z0-9_]*)(?:\{(.*)\})?$")
_LABEL = re.compile(r'([a-z_]+)="?([^",]*)"?')

# The core's words, and the names that dashboards of vLLM and SGLang know.
RENAMED = {
    "prefix_queries": "prefix_cache_queries_total",
    "prefix_hbm_hits": 'prefix_cache_hits_total{tier="hbm"}',
    "prefix_dram_hits": 'prefix_cache_hits_total{tier="dram"}',
    "prefix_disk_hits": 'prefix_cache_hits_total{tier="disk"}',
    "prefix_recomputed": "prefix_cache_recomputed_total",
    "pauses": 'num_preemptions_total{kind="pause"}',
    "drops": 'num_preemptions_total{kind="drop"}',
    "requests_running": "num_requests_running",
    "requests_waiting": "num_requests_waiting",
    "requests_paused": "num_requests_paused",
    "spills": "spills_total",
    "promotions": "promotions_total",
    "rows_looked_at": "rows_looked_at_total",
    "steps": "steps_total",
    "failed_moves": "failed_moves_total",
    "computed_again": "requests_computed_again_total",
    "hbm_evictions": 'evicted_pages_total{tier="hbm"}',
    "dram_evictions": 'evicted_pages_total{tier="dram"}',
    "disk_evictions": 'forgotten_pages_total{tier="disk"}',
}
# Old name -> name of the metrics whose names or tiers had private words. Both are exported for one release, under
# two names: a sum over a name counts nothing twice.
TIERS = {"hbm": "device", "dram": "host", "disk": "storage"}
RENEWED = {
    **{f"{tier}_pages{of}": f"kv_pages{of}" for tier in TIERS for of in ("", "_free", "_held", "_fenced", "_in_use")},
    "prefix_cache_hits_total": "prefix_cache_hit_tokens_total", "evicted_pages_total": "kv_pages_evicted_total",
    "forgotten_pages_total": "kv_pages_forgotten_total", "kv_cache_usage_perc": "kv_cache_usage_ratio",
    "pool_bytes": "kv_pool_bytes", "cache_group_pages": "kv_group_pages", "cache_group_bytes": "kv_group_bytes",
    "moves_total": "kv_moves_total", "moves_failed_total": "kv_moves_failed_total",
    "moved_bytes_total": "kv_moved_bytes_total", "move_seconds_total": "kv_move_seconds_total",
    "requests_hosted": "requests_offloaded", "peer_ignored": "pd_ignored", "rows_free": "batch_slots_free",
    "rows_looked_at_total": "batch_slots_considered_total",
    "selected_device_units_total": "selected_device_blocks_total",
}
# What an engine has only with a feature: how its numbers show that this is on, and the names that go with it.
FEATURES = {
    "host tier": (re.compile("dram_pages$"), re.compile(
        r"dram_|prefix_dram_hits|pauses|requests_paused|.*phase=\"paused\"")),
    "storage": (re.compile("disk_pages$"), re.compile(
        r"disk_|storage_|prefix_disk_hits|pages_to_store|.*phase=\"fetching\"")),
    "sparse decode": (re.compile("selected_device_units_total"), re.compile(
        r"hot_|spills|promotions|requests_hosted|prefix_recomputed|.*phase=\"decode\.(host|to_host|to_device)\"")),
    "prefill/decode pair": (re.compile("pair_"), re.compile(
        r"pair_|peer_ignored|.*phase=\"(receiving|sending)\"")),
}
STATS_AGE = "engine_stats_age_seconds"
USED = {"hbm": "hbm_pages_in_use", "dram": "dram_pages_held"}


class Metrics:
    """The API side. One per server; `text` renders it together with the engine's numbers."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._engine = _Engine()
        self._dialect: Dialect | None = None
        self._registry.register(self._engine)

        def histogram(name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(PREFIX + name, what, buckets=buckets, registry=self._registry)

        def counter(name: str, what: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(PREFIX + name, what, labels, registry=self._registry)

        self.ttft = histogram("time_to_first_token_seconds",
                              "From a request's arrival to its first token.", _TTFT_S)
        self.tokens = TokenMetrics()
        self._registry.register(self.tokens)
        self.e2e = histogram("e2e_request_latency_seconds",
                             "From a request's arrival to the end of its last choice.", _E2E_S)
        self.queue = histogram("request_queue_time_seconds",
                               "From a choice's arrival until the engine takes it.", _TTFT_S)
        self.prefill = histogram("request_prefill_time_seconds",
                                 "From a choice's start in the engine to its first token.", _TTFT_S)
        self.decode = histogram("request_decode_time_seconds",
                                "From a choice's first token to its last.", _E2E_S)
        self.prompt_lengths = histogram("request_prompt_tokens", "Prompt tokens of a request.",
                                        _TOKENS)
        self.output_lengths = histogram("request_generation_tokens", "Output tokens of finished choices.",
                                        _TOKENS)
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of finished requests.")
        self.cached_tokens = counter("cached_prompt_tokens",
                                     "Prompt tokens of finished requests that came from the prefix cache.")
        self.finished = counter("request_success", "Finished choices by finish reason.",
                                ("finished_reason",))
        self.refused = counter("connections_refused",
                               "Connections refused because no file descriptor was left for them.")
        self.answers = counter("http_responses", "HTTP responses by status.", ("status",))

    def text(self, engines: Sequence[Mapping[str, float]],
             prefill: Sequence[Mapping[str, float]] = ()) -> bytes:
        """The exposition format. `engines`: values by name, `name` or `name{tier="hbm"}`; a name
        that ends in `_total` is a counter; those of several have a label of their number. `prefill`: of
        prefill engines beside them."""
        self._engine.values = _labelled(engines) | {
            f"prefill_{name}": value for name, value in _labelled(prefill).items()}
        if self._dialect is not None:
            self._dialect.engines = engines
        return generate_latest(self._registry)

    def speak(self, dialect: str, model: str, page_size: int, usage: CacheUsage) -> None:
        """Tell the numbers under the names of `dialect`, vllm or sglang, too. Once. page_size: tokens."""
        assert self._dialect is None
        own = (self.ttft, self.tokens, self.e2e, self.queue, self.prefill, self.decode, self.prompt_lengths,
               self.output_lengths, self.prompt_tokens, self.cached_tokens, self.finished)
        self._dialect = Dialect(dialect, model, page_size, usage, own, PREFIX)
        self._registry.register(self._dialect)


class TokenMetrics(Collector):
    """Output tokens sent to clients, and the seconds between two arrivals at one choice: counted in plain
    numbers, for each chunk of text. Of one thread."""

    def __init__(self) -> None:
        self.count = 0
        self._gaps = [0] * (len(_ITL_S) + 1)     # in each bucket, and beyond the last
        self._sum = 0.0

    def gap(self, seconds: float) -> None:
        self._gaps[bisect_left(_ITL_S, seconds)] += 1
        self._sum += seconds

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(PREFIX + "generation_tokens", "Output tokens sent to clients.", self.count)
        bounds = [*map(floatToGoString, _ITL_S), "+Inf"]
        yield HistogramMetricFamily(
            PREFIX + "inter_token_latency_seconds", "Time between two output chunks of one choice.",
            buckets=list(zip(bounds, accumulate(self._gaps), strict=True)), sum_value=self._sum)


class _Engine(Collector):
    """The engine's Stats, as they were at the last scrape."""

    def __init__(self) -> None:
        self.values: Mapping[str, float] = {}

    def describe(self) -> Iterable[Metric]:
        return ()                # names come with the first Stats

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for key, value in sorted(self.values.items()):
            name, labels = parse_name(key)
            base = name.removesuffix("_total")
            family = families.get(name)
            if family is None:
                kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                family = families[name] = kind(PREFIX + base, help_of(base))
            family.add_sample(PREFIX + name, labels, value)
        yield from families.values()


def help_of(name: str) -> str:
    """A sentence for a metric of an engine, `prefill_` being those of prefill engines beside it."""
    own = name.removeprefix("prefill_")
    new = next((new for old in (own, f"{own}_total") if (new := renewed(old))), None)
    text = (f"Old name of {parse_name(new)[0]}, for one release." if new else
            HELP.get(own) or f"A number of the engine that has no description yet: {own}.")
    return text if own == name else f"Prefill instances: {text[0].lower()}{text[1:]}"


def in_use(values: Mapping[str, float]) -> dict[str, float]:
    """The engine's Stats without the numbers of features that are off."""
    off = [names for shows, names in FEATURES.values()
           if not any(shows.match(name) and (value or not name.endswith("_pages"))
                      for name, value in values.items())]
    return {name: value for name, value in values.items() if not any(names.match(name) for names in off)}


def published(values: Mapping[str, float]) -> dict[str, float]:
    """The engine's Stats under the names that users know, with each tier's usage, without features that are off."""
    out = {RENAMED.get(name, name): value for name, value in in_use(values).items()
           if name != "generation_tokens_total"}          # the API side counts what was sent
    for tier, used in USED.items():
        if values.get(f"{tier}_pages") and used in values:
            out[f'kv_cache_usage_perc{{tier="{tier}"}}'] = values[used] / values[f"{tier}_pages"]
    return out | {new: value for name, value in out.items() if (new := renewed(name))}


def renewed(key: str) -> str | None:
    """Return the name, with its labels, of a metric whose `key` is an old one; None for any other."""
    name, labels = parse_name(key)
    new = RENEWED.get(name) or (f"pd_{name[5:]}" if name.startswith("pair_") else None)
    if new is None:
        return None
    if (tier := name.partition("_")[0]) in TIERS:
        labels = {"tier": tier}
    said = ",".join(f'{label}="{TIERS.get(value, value) if label in ("tier", "src", "dst") else value}"'
                    for label, value in labels.items())
    return f"{new}{{{said}}}" if said else new


def _labelled(engines: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """What they tell under the names that users know, with the engine's number where there are several."""
    if len(engines) == 1:
        return published(engines[0])
    return {f'{name[:-1]},engine="{n}"}}' if name.endswith("}") else f'{name}{{engine="{n}"}}': value
            for n, values in enumerate(engines) for name, value in published(values).items()}


def parse_name(key: str) -> tuple[str, dict[str, str]]:
    """`bytes_total{src="hbm",dst="dram"}` as a name and its labels."""
    match = _NAME.match(key)
    assert match is not None, f"metric name {key!r}"
    return match.group(1), dict(_LABEL.findall(match.group(2) or ""))
