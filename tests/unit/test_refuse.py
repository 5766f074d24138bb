"""Every entry of REFUSED: a config that trips it alone, and its neighbours that pass."""
from __future__ import annotations

import pytest

from penstock.config.base.machine import Machine
from penstock.config.base.storage_url import StorageUrl, parse_storage
from penstock.config.settings.cli import from_options
from penstock.config.settings.refuse import REFUSED, is_public, refusals
from penstock.config.settings.resolve import lines, resolve
from penstock.config.settings.tree import Config

MACHINE = Machine(system="Linux", machine="x86_64", python="3.11", cpu="test", features=(),
                   cores=2, memory_total=8 << 30, memory_available=4 << 30)

DECODE: dict[str, object] = {"disaggregation_mode": "decode", "disaggregation_connect": ["h:1"]}
NODES: dict[str, object] = {"nnodes": 2, "pp": 2, "dist_init_addr": "127.0.0.1:1"}
PREFILL: dict[str, object] = {"disaggregation_mode": "prefill", "disaggregation_listen": "h:1"}

# One row for every entry of REFUSED, in its order: options that it refuses, options at the edge.
CASES: tuple[tuple[dict[str, object], dict[str, object]], ...] = (
    ({"max_model_len": 0}, {"max_model_len": 1}),
    ({"seed": -1}, {"seed": 2**63 - 1}),
    ({"page_size": 257}, {"page_size": 256}),
    ({"kv_cache_memory_bytes": 0}, {"kv_cache_memory_bytes": 1}),
    ({"gpu_memory_utilization": 0.0}, {"gpu_memory_utilization": 1.0}),
    ({"kv_cache_memory_bytes": "3G", "kv_offloading_size": "2G"}, {"kv_cache_memory_bytes": "3G",
                                                                   "kv_offloading_size": "1G"}),
    ({"kv_offloading_size": "0.001x"}, {"kv_offloading_size": "2.5x"}),
    ({"sparse_top_k": 0}, {"sparse_top_k": 96}),
    ({"sparse_block_size": 3, "sparse_top_k": 512, "page_size": 24},
     {"sparse_block_size": 4, "sparse_top_k": 512, "page_size": 24}),
    ({"state_interval": 40}, {"state_interval": 48}),
    ({"window_interval": 40}, {"window_interval": 48}),
    ({"sparse_top_k": 512, "page_size": 24, "sparse_block_size": 16},
     {"sparse_top_k": 512, "page_size": 24, "sparse_block_size": 12}),
    ({"sparse_top_k": 95}, {"sparse_top_k": 112, "sparse_block_size": 16}),
    ({"sparse_top_k": 512, "sparse_dense_layers": ["0", "-1"]},
     {"sparse_top_k": 512, "sparse_dense_layers": ["0", "29"]}),
    ({"sparse_dense_layers": ["0"]}, {"sparse_dense_layers": []}),
    ({"hot_buffer_tokens": 0}, {"hot_buffer_tokens": 1}),
    ({"hot_buffer_tokens": 511, "sparse_top_k": 512}, {"hot_buffer_tokens": 512, "sparse_top_k": 512}),
    ({"hot_buffer_tokens": 512, "host_decode": "off"}, {"host_decode": "off"}),
    ({"hot_buffer_tokens": 512, "sparse_top_k": 512, "kv_offloading_size": "0"},
     {"sparse_top_k": 512, "kv_offloading_size": "0"}),
    ({"sparse_block_size": 4}, {"sparse_block_size": 4, "sparse_top_k": 512}),
    ({"host_decode": "always", "kv_offloading_size": "0"}, {"host_decode": "always"}),
    ({"kv_storage": "file://host/a"}, {"kv_storage": "file:///a/b%20c"}),
    ({"kv_storage": "file:///a", "kv_offloading_size": "0"}, {"kv_storage": "file:///a", "kv_offloading_size": "1B"}),
    ({"kv_storage": "file:///a", "prefix_cache": False}, {"kv_storage": "file:///a", "prefix_cache": True}),
    ({"retained_share": 1.5}, {"retained_share": 1.0}),
    ({"retained_share": 0.5, "prefix_cache": False}, {"retained_share": 0.5, "prefix_cache": True}),
    ({"window_interval": 48, "prefix_cache": False}, {"window_interval": 48, "prefix_cache": True}),
    ({"kv_storage_bytes": "1G"}, {"kv_storage": "file:///a", "kv_storage_bytes": "1G"}),
    ({"kv_storage_key": "f"}, {"kv_storage": "file:///a", "kv_storage_key": "f"}),
    ({"kv_storage_policy": "wait_complete"},
     {"kv_storage": "file:///a", "kv_storage_policy": "wait_complete"}),
    ({"kv_storage_write_policy": "write_through_selective"},
     {"kv_storage": "file:///a", "kv_storage_write_policy": "write_through_selective"}),
    ({"kv_storage": "valkey://host", "kv_storage_bytes": "1G"},
     {"kv_storage": "file:///a", "kv_storage_bytes": "1G"}),
    ({"kv_storage": "file:///a", "kv_storage_write_policy": "none", "kv_storage_bytes": "1G"},
     {"kv_storage": "file:///a", "kv_storage_write_policy": "none"}),
    ({"kv_storage": "file:///a", "kv_storage_bytes": 1},
     {"kv_storage": "file:///a", "kv_storage_bytes": "1M"}),
    ({"kv_events_config": '{"topics": ""}'}, {"kv_events_config": '{"topic": ""}'}),
    ({"kv_events_config": '{"publisher": "zmq"}', "prefix_cache": False},
     {"kv_events_config": "{}", "prefix_cache": False}),
    ({"kv_events_config": '{"publisher": "zmq", "media": ["GPU", "CPU", "STORAGE"]}'},
     {"kv_events_config": '{"publisher": "zmq"}'}),
    ({"kv_events_config": '{"publisher": "zmq", "replay_endpoint": "tcp://*:5558"}', "dp": 2},
     {"kv_events_config": '{"publisher": "zmq", "replay_endpoint": "tcp://*:5657"}', "dp": 64}),
    ({"otlp_traces_endpoint": "grpc://host:4317"}, {"otlp_traces_endpoint": "https://[::1]:4318"}),
    ({"max_num_seqs": 0}, {"max_num_seqs": 1}),
    ({"max_num_batched_tokens": 0}, {"max_num_batched_tokens": 1}),
    ({"max_waiting": -1}, {"max_waiting": 0}),
    ({"speculative_method": "ngram", "speculative_tokens": 16},
     {"speculative_method": "ngram", "speculative_tokens": 15}),
    ({"speculative_method": "ngram", "prompt_lookup_min": 0},
     {"speculative_method": "ngram", "prompt_lookup_min": 1}),
    ({"speculative_method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 3},
     {"speculative_method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 16}),
    ({"speculative_tokens": 2}, {"speculative_tokens": 2, "speculative_method": "ngram"}),
    ({"speculative_model": "x"}, {"speculative_model": "x", "speculative_method": "eagle3"}),
    ({"prompt_lookup_min": 3}, {"prompt_lookup_min": 3, "speculative_method": "ngram"}),
    ({"prompt_lookup_max": 5}, {"prompt_lookup_max": 5, "speculative_method": "ngram"}),
    ({"speculative_method": "eagle3"}, {"speculative_method": "eagle3", "speculative_model": "x"}),
    ({"device": "cuda"}, {"device": "auto"}),
    ({"device": "cuda", "backends": ["gather=reference"]},
     {"device": "cpu", "backends": ["gather=reference"]}),
    ({"dtype": "gguf", "load_format": "dummy"}, {"dtype": "gguf", "load_format": "gguf"}),
    ({"dtype": "gguf", "backends": ["linear=onednn"]},
     {"dtype": "gguf", "backends": ["linear=c", "layer=reference"]}),
    ({"debug_cpu_isa": "avx2"}, {"debug_cpu_isa": "plain"}),
    ({"debug_cpu_isa": "plain", "device": "cuda"}, {"debug_cpu_isa": "plain", "device": "cpu"}),
    ({"threads": 0}, {"threads": 1}),
    ({"pp": 0}, {"pp": 1}),
    ({"pp": 2, "pp_together": 0}, {"pp": 2, "pp_together": 1}),
    ({"tp": 0}, {"tp": 64}),
    ({"tp": 4, "ep": 3}, {"tp": 6, "ep": 0}),
    ({"pp": 2, "pp_layers": ["30"]}, {"pp": 2, "pp_layers": ["1", "29"]}),
    ({"step_timeout_s": 0.5}, {"step_timeout_s": 1}),
    ({"gpu_layers": -2}, {"gpu_layers": 99}),
    ({"gpu_layers": 0, "device": "cuda"}, {"gpu_layers": 0, "device": "cpu"}),
    *(({name: "[1]"}, {name: {"a": 1}}) for name in (
        "hf_overrides", "default_chat_template_kwargs", "override_generation_config")),
    ({"backends": ["linear"]}, {"backends": ["linear=reference"]}),
    ({"dp": 0}, {"dp": 2}),
    ({"port": 65536}, {"port": 0}),
    ({"host": ""}, {"host": "::1"}),
    ({"host": "0.0.0.0"}, {"host": "0.0.0.0", "api_key_file": "keys"}),
    ({"api_key": "k", "api_key_file": "f"}, {"api_key": "k"}),
    ({"api_key": " "}, {"api_key": "k"}),
    ({"admin_api_key": "f"}, {"admin_api_key": "f", "api_key_file": "keys"}),
    ({"log_stats_interval": -1}, {"log_stats_interval": 0}),
    ({"ssl_keyfile": "k"}, {"ssl_keyfile": "k", "ssl_certfile": "c"}),
    ({"cors_origins": ["chat.example.com"], "api_key": "k"},
     {"cors_origins": ["https://chat.example.com", "*"], "api_key": "k"}),
    ({"cors_origins": ["https://chat.example.com"]}, {"cors_origins": ["http://localhost:3000"]}),
    ({"body_bytes_max": 1023}, {"body_bytes_max": 1024}),
    ({"timeout_keep_alive": 0}, {"timeout_keep_alive": 1}),
    ({"drain_s": -0.5}, {"drain_s": 0}),
    ({"drain_store_s": 3601}, {"drain_store_s": 0}),
    ({"ready_needs_prefill": True, "disaggregation_mode": "decode", "router_dialect": "sglang"},
     {"ready_needs_prefill": True, **DECODE}),
    ({"prefill_replicas": 1}, {"prefill_replicas": 2, "decode_replicas": 3}),
    ({"prefill_replicas": 1, "decode_replicas": 1, **DECODE}, DECODE),
    ({"prefill_replicas": 1, "decode_replicas": 1, "device": "cuda"}, {"prefill_replicas": 1, "decode_replicas": 1,
                                                                       "device": "cpu"}),
    ({"dp": 2, "prefill_replicas": 1, "decode_replicas": 2}, {"prefill_replicas": 1, "decode_replicas": 2}),
    ({"dp": 2, **PREFILL}, {"dp": 2, **DECODE}),
    ({"disaggregation_mode": "prefill"}, PREFILL),
    ({"disaggregation_mode": "decode"}, {"disaggregation_mode": "decode", "router_dialect": "sglang"}),
    ({"router_dialect": "vllm", **PREFILL, "disaggregation_listen": "unix:s"}, {"router_dialect": "vllm", **PREFILL}),
    ({"disaggregation_allow": ["h"], "router_dialect": "sglang", **DECODE},
     {"disaggregation_allow": ["h"], "router_dialect": "sglang", "disaggregation_mode": "decode"}),
    ({"disaggregation_transfer_backend": "nixl"}, {"disaggregation_transfer_backend": "nixl", **DECODE}),
    ({"disaggregation_transfer_backend": "nixl", "cluster_tls": True, **DECODE},
     {"cluster_tls": True, **DECODE}),
    ({"disaggregation_fallback": "refuse"}, {"disaggregation_fallback": "refuse", **DECODE}),
    ({"disaggregation_timeout_s": 5.0, **PREFILL}, {"disaggregation_timeout_s": 5.0, "router_dialect": "sglang",
                                                    **PREFILL}),
    ({"disaggregation_timeout_s": 0.0, **DECODE}, {"disaggregation_timeout_s": 0.1, **DECODE}),
    ({"nnodes": 0}, {"nnodes": 1}),
    ({"node_rank": 2, **NODES}, {"node_rank": 1, **NODES}),
    ({"nnodes": 2, "pp": 2}, NODES),
    ({"dist_init_addr": "127.0.0.1:1"}, NODES),
    ({**NODES, "dist_init_addr": "127.0.0.1:65535", "dp": 2}, {**NODES, "dist_init_addr": "[::1]:65535"}),
    ({**NODES, "dist_init_addr": "10.0.0.1:1"}, {**NODES, "dist_init_addr": "h:1", "cluster_tls_cert": "pem"}),
    ({"nnodes": 2, "tp": 2, "dist_init_addr": "h:1", "cluster_tls_cert": "pem"},
     {"nnodes": 2, "tp": 2, "dist_init_addr": "h:1", "cluster_insecure": True}),
    ({**NODES, "nnodes": 3, "tp": 2}, {**NODES, "nnodes": 4, "tp": 2}),
    ({"cluster_key_file": "key"}, {"cluster_key_file": "key", **DECODE}),
    ({"cluster_tls_cert": "pem", **DECODE}, {"cluster_tls_cert": "pem", **NODES, **DECODE}),
    ({"cluster_tls": True, **PREFILL}, {"cluster_tls": True, **DECODE}),
    ({"cluster_tls": True, **NODES}, {"cluster_tls_cert": "pem", **NODES}),
    ({"cluster_tls": True, "cluster_insecure": True, **DECODE}, {"cluster_insecure": True, **DECODE}),
    ({"heartbeat_timeout_s": 0.5}, {"heartbeat_timeout_s": 1}),
)


def made(options: dict[str, object]) -> Config:
    return from_options("demo", options)


def test_every_refusal_has_a_case() -> None:
    assert len(CASES) == len(REFUSED)


@pytest.mark.parametrize("index", range(len(REFUSED)))
def test_refusal_trips_alone_and_not_at_its_edge(index: int) -> None:
    bad, good = CASES[index]
    refused = REFUSED[index]
    config = made(bad)
    assert refused.when(config, MACHINE)
    text = refused.text(config, MACHINE)
    assert text in refusals(config, MACHINE)
    assert text.startswith(("--", "no --")) and "\n" not in text
    resolve(from_options("demo", good), MACHINE)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1.0, 1.0001])
def test_numbers_that_are_no_fraction(number: float) -> None:
    assert refusals(from_options("demo", {"gpu_memory_utilization": number}), MACHINE)


@pytest.mark.parametrize(("host", "public"), [
    ("127.0.0.1", False), ("127.9.9.9", False), ("localhost", False), ("::1", False),
    ("0.0.0.0", True), ("::", True), ("10.0.0.1", True), ("example", True)])
def test_which_addresses_are_public(host: str, public: bool) -> None:
    """A public bind needs a key."""
    assert is_public(host) == public
    assert bool(refusals(from_options("demo", {"host": host}), MACHINE)) == public
    assert not refusals(from_options("demo", {"host": host, "api_key_file": "f"}), MACHINE)


def test_a_budget_below_the_least_is_refused_with_the_numbers() -> None:
    [text] = refusals(from_options("demo", {"sparse_top_k": 95}), MACHINE)
    assert text == ("--sparse-top-k 95, --sparse-block-size 8: a step always reads the first 16 and the "
                    "last 64 tokens, in whole blocks, and selects at least one more: at least 88 with blocks of "
                    "4, 96 with blocks of 8, 112 with blocks of 16 tokens")


def test_every_page_size_is_accepted() -> None:
    for size in range(1, 257):
        resolve(from_options("demo", {"page_size": size}), MACHINE)


def test_a_key_is_never_part_of_a_message() -> None:
    config = from_options("demo", {"api_key": "marker-7", "api_key_file": "f"})
    assert all("marker-7" not in text for text in refusals(config, MACHINE))


def test_what_a_storage_may_be_called() -> None:
    assert parse_storage("s3://bucket/some/where") == StorageUrl("s3", "bucket", "/some/where")
    assert parse_storage("valkey:///run/a.sock") == StorageUrl("valkey", None, "/run/a.sock")
    found = parse_storage("redis://me:w%2Ford@[::1]:6380/1")
    assert found == StorageUrl("valkey", "::1", "/1", 6380, 1, "me", "w/ord")
    assert "ord" not in f"{found}{found.shown}" and found.shown == "valkey://[::1]:6380/1"
    for wrong in ("", "file:", "s3://", "s3://me@bucket", "s3://b/../c", "redis://host/one", "valkey://host:0",
                  "redis://host:x", "redis://", "valkey:///", "redis://host?db=1", "http://host"):
        assert parse_storage(wrong) is None, wrong


def test_a_password_of_a_storage_may_come_from_the_environment(monkeypatch) -> None:
    monkeypatch.setenv("REDISCLI_AUTH", "word")
    found = parse_storage("valkey://me@host")
    assert (found.user, found.password) == ("me", "word") and "word" not in f"{found}{found.shown}"
    assert parse_storage("valkey://me:other@host").password == "other"
    monkeypatch.setenv("VALKEYCLI_AUTH", "third")
    assert parse_storage("valkey:///run/a.sock").password == "third"


def test_a_password_of_a_storage_is_shown_nowhere() -> None:
    good, bad = (from_options("demo", {"kv_storage": f"valkey://me:{word}@host"})
                 for word in ("pass@word", "pass/word"))
    resolved = resolve(good, MACHINE)
    [line] = [line for line in lines(resolved) if line.startswith("kv_storage ")]
    assert line == "kv_storage valkey://...@host" and resolved.kv.kv_storage == good.kv.kv_storage
    [text] = refusals(bad, MACHINE)
    assert "valkey://...@host" in text and "word" not in text
