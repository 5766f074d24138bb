"""Metrics under the names of other engines: what routers of vLLM and of SGLang find, and with which values."""
from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.core.core import Core
from penstock.core.settings import CoreConfig
from penstock.engine.client.dialect import CacheUsage
from penstock.engine.client.metrics import Metrics

STATS = {"requests_running": 3.0, "requests_waiting": 2.0, "prefix_queries": 100.0, "prefix_hbm_hits": 20.0,
         "prefix_dram_hits": 10.0, "prefix_disk_hits": 5.0, "pauses": 1.0, "drops": 2.0, "hbm_pages": 40.0,
         "hbm_pages_in_use": 30.0, "hbm_pages_held": 39.0, "dram_pages": 160.0, "dram_pages_in_use": 20.0,
         "dram_pages_held": 150.0}
# Names and types that routers and dashboards read.
VLLM = {"num_requests_running": "gauge", "num_requests_waiting": "gauge", "kv_cache_usage_perc": "gauge",
        "gpu_cache_usage_perc": "gauge", "cache_config_info": "gauge", "prefix_cache_queries": "counter",
        "prefix_cache_hits": "counter", "gpu_prefix_cache_queries": "counter", "gpu_prefix_cache_hits": "counter",
        "num_preemptions": "counter", "prompt_tokens": "counter", "generation_tokens": "counter",
        "request_success": "counter", "time_to_first_token_seconds": "histogram",
        "inter_token_latency_seconds": "histogram", "e2e_request_latency_seconds": "histogram",
        "request_queue_time_seconds": "histogram", "request_prefill_time_seconds": "histogram",
        "request_decode_time_seconds": "histogram", "request_prompt_tokens": "histogram",
        "request_generation_tokens": "histogram"}
SGLANG = {"num_running_reqs": "gauge", "num_queue_reqs": "gauge", "token_usage": "gauge", "cache_hit_rate": "gauge",
          "num_used_tokens": "gauge", "max_total_num_tokens": "gauge", "cache_config_info": "gauge",
          "prompt_tokens": "counter", "generation_tokens": "counter", "cached_tokens": "counter",
          "time_to_first_token_seconds": "histogram", "inter_token_latency_seconds": "histogram",
          "e2e_request_latency_seconds": "histogram", "queue_time_seconds": "histogram"}


def families(dialect, engines=(STATS,), *, reads_host=False, metrics=None):
    """Families by name without the prefix of the dialect."""
    metrics = metrics or Metrics()
    metrics.speak(dialect, "m", 16, CacheUsage(reads_host))
    return {f.name.removeprefix(f"{dialect}:"): f
            for f in text_string_to_metric_families(metrics.text(engines).decode())
            if f.name.startswith(f"{dialect}:")}


def value(family, **labels):
    [found] = [s.value for s in family.samples if labels.items() <= s.labels.items()]
    return found


@pytest.mark.parametrize("dialect, names", [("vllm", VLLM), ("sglang", SGLANG)])
def test_each_name_has_its_type_and_the_labels_that_routers_select_by(dialect, names):
    found = families(dialect)
    assert {name: family.type for name, family in found.items()} == names
    samples = [sample for family in found.values() for sample in family.samples]
    assert {s.labels["model_name"] for s in samples} == {"m"} and {s.labels["engine"] for s in samples} == {"0"}
    for family in found.values():
        assert len(family.documentation.split()) >= 3 and family.documentation.endswith(".")


def test_values_of_vllm():
    found = families("vllm")
    assert value(found["num_requests_running"]) == 3 and value(found["num_requests_waiting"]) == 2
    assert value(found["kv_cache_usage_perc"]) == value(found["gpu_cache_usage_perc"]) == 30 / 40
    assert value(found["prefix_cache_hits"]) == value(found["gpu_prefix_cache_hits"]) == 35
    assert value(found["prefix_cache_queries"]) == 100 and value(found["num_preemptions"]) == 3
    assert value(found["cache_config_info"], block_size="16", num_gpu_blocks="40") == 1


def test_values_of_sglang():
    found = families("sglang")
    assert value(found["num_running_reqs"]) == 3 and value(found["num_queue_reqs"]) == 2
    assert value(found["token_usage"]) == 30 / 40 and value(found["cache_hit_rate"]) == 0.35
    assert value(found["num_used_tokens"]) == 480 and value(found["max_total_num_tokens"]) == 640
    assert value(found["cache_config_info"], page_size="16", num_pages="40") == 1


def test_host_pages_are_room_where_decode_reads_them():
    found = families("vllm", reads_host=True)
    assert value(found["kv_cache_usage_perc"]) == 50 / 200
    assert value(found["cache_config_info"], num_gpu_blocks="200") == 1
    assert CacheUsage.of({"hot_buffer_tokens": 2112}).pages(STATS) == 200
    assert CacheUsage.of({"hot_buffer_tokens": 0}).pages(STATS) == CacheUsage.of({}).pages(STATS) == 40


def test_several_engines_have_their_numbers_and_what_the_server_counts_is_there_once():
    metrics = Metrics()
    metrics.ttft.observe(0.1)
    metrics.finished.labels("stop").inc()
    found = families("vllm", (STATS, STATS | {"requests_running": 7.0}), metrics=metrics)
    assert value(found["num_requests_running"], engine="0") == 3
    assert value(found["num_requests_running"], engine="1") == 7
    [count] = [s.value for s in found["time_to_first_token_seconds"].samples if s.name.endswith("_count")]
    assert count == 1 and value(found["request_success"], finished_reason="stop") == 1


def test_without_a_dialect_no_other_name_is_there():
    assert b"vllm:" not in Metrics().text([STATS]) and b"sglang:" not in Metrics().text([STATS])


def test_a_core_counts_what_requests_hold_in_each_tier():
    stats = Core(CoreConfig(page_size=16, rows=4, hbm_pages=8, dram_pages=16)).stats()
    assert stats["hbm_pages_in_use"] == stats["dram_pages_in_use"] == 0
    assert CacheUsage(reads_host=True).share(stats) == 0 and CacheUsage(reads_host=True).pages(stats) == 24
