"""`penstock bench` end to end: offline workloads of a tiny model, and load on a real server of the demo."""
from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pipeline_engine import checkpoint

PENSTOCK = [sys.executable, "-m", "penstock.cli.main"]
END_S = 550


def bench(*words: str) -> str:
    done = subprocess.run([*PENSTOCK, "bench", *words, "--quiet"], capture_output=True, text=True,
                          timeout=END_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_offline_measures_both_arms_in_turns(tmp_path: Path) -> None:
    out = bench(checkpoint(tmp_path), "--against", "transformers", "--runs", "1", "--output-len", "4",
                "--max-model-len", "600", "--threads", "1", "--kv-cache-memory-bytes", "100M",
                "--output-json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png"))
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert {name for name, arms in results.items() if len(arms) == 2} == {
        "decode, 1 stream", "decode, 8 streams", "prefill 512"}
    assert all(v > 0 for arms in results.values() for values in arms.values() for v in values)
    assert "ratio" in out
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_load_on_a_server_counts_every_token(tmp_path: Path) -> None:
    server = subprocess.Popen(
        [*PENSTOCK, "serve", "demo", "--port", "0", "--threads", "1", "--kv-cache-memory-bytes", "100M"],
        stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        found = re.search(r"ready on (http://\S+)", server.stdout.readline())
        assert found
        out = bench("--base-url", found[1], "--num-prompts", "6", "--concurrency", "3",
                    "--request-rate", "50", "--input-len", "20", "--output-len", "5",
                    "--output-json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "p.png"))
        series = json.loads((tmp_path / "out.json").read_text())["series"]
        assert len(series["end to end"]) == 6 and len(series["inter-token latency"]) >= 6
        assert " 0 failed" in out and (tmp_path / "p.png").exists()
    finally:
        server.terminate()
        assert server.wait(END_S) == 0


AGENTS = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64,
          "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 1000,
          "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "rope_theta": 10000.0, "tie_word_embeddings": False,
          "hidden_act": "silu", "torch_dtype": "float32"}


@pytest.mark.parametrize(("kv_bytes", "low", "high"), [("10M", 0.99, 1.0), ("1300K", 0.3, 0.95)])
def test_agents_find_what_is_possible_where_the_cache_has_room(
        tmp_path: Path, kv_bytes: str, low: float, high: float) -> None:
    """Four agents of 256 bytes a token: 11,000 tokens together."""
    (tmp_path / "config.json").write_text(json.dumps(AGENTS))
    server = subprocess.Popen([*PENSTOCK, "serve", str(tmp_path), "--load-format", "dummy", "--port", "0",
                               "--threads", "1", "--kv-cache-memory-bytes", kv_bytes],
                              stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        found = re.search(r"ready on (http://\S+)", server.stdout.readline())
        assert found
        out = bench("agentx", "--base-url", found[1], "--agents", "4", "--turns", "6", "--scale", "100",
                    "--output-json", str(tmp_path / "out.json"))
        result = json.loads((tmp_path / "out.json").read_text())
        assert " 0 failed" in out and len(result["series"]["time to first token"]) == 24
        assert 0.6 < result["hits_largest"] < 0.9
        assert low <= result["hits"] / result["hits_largest"] <= high, out
    finally:
        server.terminate()
        assert server.wait(END_S) == 0


@pytest.mark.sweep
def test_hits_by_size_of_the_hot_buffer(tmp_path: Path) -> None:
    bench("demo", "--threads", "1", "--sparse-top-k", "96", "--hot-context", "160", "--output-len", "8",
          "--max-num-seqs", "1", "--kv-cache-memory-bytes", "100M", "--kv-offloading-size", "100M",
          "--plot-hot", str(tmp_path / "hot.png"), "--output-json", str(tmp_path / "hot.json"))
    sizes = json.loads((tmp_path / "hot.json").read_text())["sizes"]
    assert [s["hot_buffer_tokens"] for s in sizes] == [112, 160]
    assert sizes[0]["hot_misses"] >= sizes[1]["hot_misses"] > 0 == sizes[1]["device"]
    assert (tmp_path / "hot.png").read_bytes().startswith(b"\x89PNG")
    refused = subprocess.run([*PENSTOCK, "bench", "demo", "--plot-hot", "x.png"], capture_output=True,
                             text=True, timeout=END_S, check=False)
    assert refused.returncode == 2 and "add --sparse-top-k" in refused.stderr


@pytest.mark.sweep
def test_drafts_are_counted_beside_the_speed(tmp_path: Path) -> None:
    out = bench("demo", "--speculative", "--speculative-method", "ngram", "--threads", "1", "--runs", "1",
                "--output-len", "32", "--kv-cache-memory-bytes", "100M", "--output-json", str(tmp_path / "out.json"))
    found = json.loads((tmp_path / "out.json").read_text())
    drafted, accepted, said = found["drafted, accepted, said"]["repeat"]
    assert 0 < accepted <= drafted and said <= 32
    assert all(len(arm) == 1 for arms in found["results"].values() for arm in arms.values())
    assert f"| {drafted} " in out and f"| {accepted} " in out
    refused = subprocess.run([*PENSTOCK, "bench", checkpoint(tmp_path), "--speculative", "--quiet",
                              "--speculative-method", "ngram", "--kv-cache-memory-bytes", "20M"],
                             capture_output=True, text=True, timeout=END_S, check=False)
    assert refused.returncode == 2 and "has no tokenizer" in refused.stderr.splitlines()[-1]
