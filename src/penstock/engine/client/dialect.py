"""Metrics under the names of vLLM or SGLang, beside our own: for routers and dashboards that know only those.

Owns those names. What they mean: docs/guides/routers.md.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

# Of the API process, by our names. Histograms and counters have the same meaning in both.
_SAME = {name: name for name in (
    "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds",
    "prompt_tokens", "generation_tokens")}
_API: dict[str, dict[str, str]] = {
    "vllm": _SAME | {name: name for name in (
        "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
        "request_prompt_tokens", "request_generation_tokens", "request_success")},
    "sglang": _SAME | {"request_queue_time_seconds": "queue_time_seconds", "cached_prompt_tokens": "cached_tokens"}}
_PREFIX_HITS = ("prefix_hbm_hits", "prefix_dram_hits", "prefix_disk_hits")


class CacheUsage:
    """How full an engine's KV cache is, for a router that chooses among engines.

    reads_host   whether decode can read KV from host memory: then its pages are room for requests too, and
                 the device alone would look full all day
    """

    def __init__(self, reads_host: bool) -> None:
        self._tiers = ("hbm", "dram") if reads_host else ("hbm",)

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> CacheUsage:
        """info: what an engine said of itself when it was ready."""
        return cls(reads_host=info.get("hot_buffer_tokens", 0) > 0)

    def pages(self, stats: Mapping[str, float]) -> float:
        """Return the pages that there are, used and free. stats: by the core's names, as everywhere here."""
        return sum(stats.get(f"{tier}_pages", 0.0) for tier in self._tiers)

    def used(self, stats: Mapping[str, float]) -> float:
        """Return the pages that requests hold; those that are only cached are room."""
        return sum(stats.get(f"{tier}_pages_in_use", 0.0) for tier in self._tiers)

    def share(self, stats: Mapping[str, float]) -> float:
        """Return the part of the pages that requests hold, 0 to 1."""
        return min(1.0, self.used(stats) / max(1.0, self.pages(stats)))


class Dialect(Collector):
    """Labels of each are `model_name` and `engine`, the number of the engine: 0 for what is counted once for
    all of them. `engines`, their Stats by the core's names, is set before a scrape."""

    def __init__(self, dialect: str, model: str, page_size: int, usage: CacheUsage, own: Iterable[Collector],
                 prefix: str) -> None:
        """own: collectors of the API process; prefix: what their names begin with."""
        self._dialect, self._model, self._page_size, self._usage = dialect, model, page_size, usage
        self._own, self._prefix = tuple(own), prefix
        self.engines: Sequence[Mapping[str, float]] = ()

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        yield from self._of_api()
        values = self._vllm if self._dialect == "vllm" else self._sglang
        families: dict[str, Metric] = {}
        for n, stats in enumerate(self.engines):
            for (name, what, *more), value in values(stats).items():
                family = families.get(name)
                if family is None:
                    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                    family = families[name] = kind(f"{self._dialect}:{name.removesuffix('_total')}", what)
                family.add_sample(f"{self._dialect}:{name}", self._labels(n) | dict(more), value)
        yield from families.values()

    def _labels(self, engine: int = 0) -> dict[str, str]:
        return {"model_name": self._model, "engine": str(engine)}

    def _of_api(self) -> Iterator[Metric]:
        for family in (family for collector in self._own for family in collector.collect()):
            ours = family.name.removeprefix(self._prefix)
            if (theirs := _API[self._dialect].get(ours)) is None:
                continue
            made = Metric(f"{self._dialect}:{theirs}", family.documentation, family.type)
            for sample in family.samples:
                made.add_sample(f"{self._dialect}:{theirs}{sample.name.removeprefix(family.name)}",
                                self._labels() | sample.labels, sample.value)
            yield made

    def _vllm(self, stats: Mapping[str, float]) -> dict[tuple[Any, ...], float]:
        share, hits = self._usage.share(stats), sum(stats.get(name, 0.0) for name in _PREFIX_HITS)
        queries = stats.get("prefix_queries", 0.0)
        shape = (("block_size", str(self._page_size)), ("num_gpu_blocks", str(int(self._usage.pages(stats)))))
        return {
            ("num_requests_running", "Requests that hold a batch slot."): stats.get("requests_running", 0.0),
            ("num_requests_waiting", "Requests that wait for a batch slot."): stats.get("requests_waiting", 0.0),
            ("kv_cache_usage_perc", _SHARE): share,
            ("gpu_cache_usage_perc", _SHARE): share,              # until vLLM 0.9; routers still read it
            ("prefix_cache_queries_total", _QUERIES): queries,
            ("prefix_cache_hits_total", _HITS): hits,
            ("gpu_prefix_cache_queries_total", _QUERIES): queries,
            ("gpu_prefix_cache_hits_total", _HITS): hits,
            ("num_preemptions_total", "Preemptions of requests."): stats.get("pauses", 0.0) + stats.get("drops", 0.0),
            ("cache_config_info", "Shape of the KV cache, in its labels.", *shape): 1.0}

    def _sglang(self, stats: Mapping[str, float]) -> dict[tuple[Any, ...], float]:
        queries, hits = stats.get("prefix_queries", 0.0), sum(stats.get(name, 0.0) for name in _PREFIX_HITS)
        pages = int(self._usage.pages(stats))
        shape = (("page_size", str(self._page_size)), ("num_pages", str(pages)))
        return {
            ("num_running_reqs", "Requests that hold a batch slot."): stats.get("requests_running", 0.0),
            ("num_queue_reqs", "Requests that wait for a batch slot."): stats.get("requests_waiting", 0.0),
            ("token_usage", _SHARE): self._usage.share(stats),
            ("num_used_tokens", "Tokens whose KV requests hold."): self._usage.used(stats) * self._page_size,
            ("max_total_num_tokens", "Tokens that the KV cache has room for."): float(pages * self._page_size),
            ("cache_hit_rate", "Share of looked-up prompt tokens that were found, since the start."):
                hits / max(1.0, queries),
            ("cache_config_info", "Shape of the KV cache, in its labels.", *shape): 1.0}


_SHARE = "Share of the KV cache that requests hold, 0 to 1; with host memory where decode reads from it."
_QUERIES = "Prompt tokens looked up in the prefix cache."
_HITS = "Prompt tokens found in the prefix cache, in any tier."
