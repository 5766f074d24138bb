"""`penstock plan` in virtual time: what steps and copies take, and what sessions, routers and storage make of it."""
from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.cli.main import main
from penstock.config.base.errors import ConfigError
from penstock.config.settings.cli import from_options
from penstock.core.settings import CacheGroup, CoreConfig
from penstock.plan.grid import Point, points
from penstock.plan.rates import NUMBERS, Rates, parse, read_rates, unmeasured
from penstock.plan.report import knees
from penstock.plan.shape import Planned, Shape, kv_read, plan_engine
from penstock.plan.trace import Session, Span, Trace, Turn, part_of
from penstock.plan.world import Result, Routing, World

RESULTS = Path(__file__).parents[2] / "bench" / "results"
QWEN3_8B = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "rms_norm_eps": 1e-6, "max_position_embeddings": 327_680, "rope_theta": 1e6,
    "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "bfloat16", "attention_bias": False}
PAGE = 16
# 1 ms a prompt token, 10 ms a decode step and request, 16 bytes a token over links of 160 tokens/s.
SLOW = unmeasured("cpu", prompt_flops_s=1e3, request_us=10_000, miss_share=0.5, miss_bytes_s=1e12,
                  load_bytes_s=16 * 160, save_bytes_s=1e12, store_read_bytes_s=16 * 10_000, store_write_bytes_s=1e12)
SHAPE = Shape(dense_bytes=0, expert_bytes=0, visited=0, token_flops=1, attention=())


def planned(*, device: int = 100, host: int = 0, **settings: Any) -> Planned:
    given: dict[str, Any] = {"page_size": PAGE, "rows": 8, "hbm_pages": device, "dram_pages": host, "max_len": 4_096,
                         "groups": (CacheGroup(name="full", page_bytes=16 * PAGE),), **settings}
    core = CoreConfig(**given)
    return Planned(core=core, shape=SHAPE, vocab=1_000, context=core.max_len, weight_bytes=0, device_bytes=0,
                   host_bytes=0)


def single(name: str, tokens: int, at: float, output: int = 1) -> Session:
    return Session(at, (Turn((Span(name, tokens),), output),))


def run(*sessions: Session, engines: int = 1, routing: Routing = "affinity", storage: float = 0, rates: Rates = SLOW,
        scale: float = 1, **settings: Any) -> Result:
    return World(Trace("", sessions), planned(**settings), rates, engines=engines, routing=routing,
                 storage_bytes=storage, scale=scale).run()


def test_time_to_first_token_is_that_of_the_prompt_and_of_those_before() -> None:
    result = run(single("a", 300, 0), single("b", 200, 0.1))
    assert result.ttft_s == pytest.approx([0.300, 0.400]) and result.seconds == pytest.approx(0.5)
    assert result.prompt_tokens == 500 and result.hits == 0


def test_gaps_between_tokens_hold_the_prompt_that_comes_between() -> None:
    result = run(single("a", 100, 0, output=5), single("b", 200, 0.115, output=1))
    # The step with the prompt begins when the one before has ended, and decodes as well.
    assert sorted(result.gaps_s) == pytest.approx([0.010, 0.010, 0.010, 0.210])


def test_a_prompt_that_only_the_host_has_waits_for_the_link() -> None:
    # The second prompt evicts the first, which then loads 28 pages at 160 tokens/s and computes the last one.
    result = run(single("a", 480, 0), single("b", 480, 10), single("a", 480, 20), device=31, host=100)
    assert result.host_tokens == 448 and result.device_tokens == 16
    assert result.ttft_s[2] == pytest.approx(448 / 160 + 0.016)
    assert result.load_busy == pytest.approx(448 / 160 / result.seconds)


def test_more_host_memory_never_lowers_the_hits_of_sessions() -> None:
    def talk(n: int) -> Session:
        return Session(n, tuple(Turn((Span(f"{n} {t}", 100),), 10, 4.0, continues=t > 0) for t in range(6)))

    hits = [run(*map(talk, range(4)), device=64, host=host, rates=replace(SLOW, load_bytes_s=1e9)).hits
            for host in (0, 64, 200)]
    assert hits[0] < hits[1] < hits[2]
    whole = run(*map(talk, range(4)), device=400)
    assert whole.hits == pytest.approx(whole.largest_hits) and hits[2] <= whole.hits


def test_affinity_finds_more_than_round_robin() -> None:
    talks = [Session(n / 7, tuple(Turn((Span(f"{n} {t}", 64),), 4, 1.0, continues=t > 0) for t in range(5)))
             for n in range(5)]
    near, far = (run(*talks, engines=2, routing=routing) for routing in ("affinity", "round-robin"))
    assert near.hits == pytest.approx(near.largest_hits, abs=0.01) and far.hits < near.hits - 0.1


def test_storage_serves_an_engine_that_has_never_seen_the_prompt() -> None:
    alike = [single("a", 320, 5 * n) for n in range(2)]
    settings: dict[str, Any] = {"host": 100, "engines": 2, "routing": "round-robin"}
    assert run(*alike, **settings).hits == 0
    shared = run(*alike, **settings, storage=1e6, disk_pages=1 << 10, store_root=b"x")
    assert shared.storage_tokens == 304 and shared.read_busy > 0
    small = run(*alike, **settings, storage=5 * 16 * PAGE, disk_pages=1 << 10, store_root=b"x")
    assert small.storage_tokens < 100


def test_requests_beyond_the_device_decode_from_host_memory() -> None:
    both = [single(name, 400, 0, output=40) for name in "ab"]
    hot: dict[str, Any] = {"hot_pages": 4, "budget": 48}
    dense, sparse = (run(*both, device=40, host=200, **more) for more in (dict[str, Any](), hot))
    assert sparse.ttft_s[1] < dense.ttft_s[1] - 0.3, "the second request did not have to wait"
    slow = run(*both, device=40, host=200, rates=replace(SLOW, selecting_us=10_000), **hot)
    assert slow.seconds > sparse.seconds + 0.2, "it decodes from host memory"


def test_part_of_a_fleet_has_its_share_of_sessions_and_of_the_storage() -> None:
    trace = Trace("", tuple(Session(n / 5, tuple(
        Turn((Span(f"{n} {t}", 64),), 4, 1.0, continues=t > 0) for t in range(5))) for n in range(40)))
    assert [s.start_s * 5 for s in part_of(trace, 0.25).sessions] == pytest.approx(range(0, 40, 4))
    assert part_of(trace, 1.0) == trace and len(part_of(trace, 0.3).sessions) == 12

    def fleet(engines: int) -> Result:
        settings = planned(device=64, host=64, disk_pages=1 << 10, store_root=b"x")
        return World(part_of(trace, engines / 8), settings, SLOW, engines=engines, storage_bytes=2_000 * 16 * PAGE,
                     storage_share=engines / 8).run()

    whole, half = fleet(8), fleet(4)
    assert half.hits == pytest.approx(whole.hits, abs=0.03) and 0.3 < whole.hits < 0.9
    assert half.prompt_tokens == pytest.approx(whole.prompt_tokens / 2, rel=0.01)
    assert half.storage_tokens > 0


def test_scale_gives_the_same_times_and_shares() -> None:
    def talks(scale: int) -> list[Session]:
        return [Session(n, tuple(Turn((Span(f"{n} {t}", 640 // scale),), 160 // scale, 4.0, continues=t > 0)
                                 for t in range(4))) for n in range(4)]

    whole = run(*talks(1), device=400, host=800, max_len=8_192)
    part = run(*talks(4), device=100, host=200, max_len=2_048, step_tokens=128, scale=4)
    assert part.hits == pytest.approx(whole.hits, abs=0.02)
    assert part.seconds == pytest.approx(whole.seconds, rel=0.1)
    assert part.prompt_tokens == whole.prompt_tokens


def test_a_context_that_no_pool_holds_is_refused_and_counted() -> None:
    result = run(single("a", 2_000, 0), single("b", 100, 0), device=20)
    assert result.refused == 1 and len(result.ttft_s) == 1


# ---------------------------------------------------------------- a real model and real figures
@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen")
    (path / "config.json").write_text(json.dumps(QWEN3_8B))
    return path


def decode_ms(qwen: Path, requests: int, tokens: int, output: int = 40, **options: object) -> float:
    """Median step of requests that are all there."""
    config = from_options(str(qwen), {"kv_cache_memory_bytes": 100 << 30, "max_num_seqs": 64, "page_size": 64,
                                      **options})
    rates = read_rates("h200")
    sessions = [single(str(n), tokens, 0, output) for n in range(requests)]
    result = World(Trace("", tuple(sessions)), plan_engine(config, rates), rates).run()
    return 1e3 * sorted(result.gaps_s)[len(result.gaps_s) // 2]


@pytest.mark.parametrize(("requests", "tokens", "measured_ms"), [
    (1, 512, 4.478), (8, 8_192, 7.125), (1, 32_768, 5.630), (32, 8_192, 13.7)])
def test_decode_steps_of_an_h200_are_those_that_were_measured(qwen: Path, requests: int, tokens: int,
                                                             measured_ms: float) -> None:
    assert decode_ms(qwen, requests, tokens) == pytest.approx(measured_ms, rel=0.05)


def test_a_step_that_decodes_from_host_memory_takes_what_was_measured(qwen: Path) -> None:
    """8 requests of 64k with 16 GB for KV on the device, of which 2,048 tokens are selected: 14.4 ms."""
    took = decode_ms(qwen, 8, 65_536, 120, kv_cache_memory_bytes=16 * 10**9, kv_offloading_size=f"{78 * 10**9}B",
                     sparse_top_k=2_048, host_decode="always", hot_buffer_tokens=4_096)
    assert took == pytest.approx(14.44, rel=0.15)


def test_a_prompt_on_an_h200_takes_what_was_measured(qwen: Path) -> None:
    rates = read_rates("h200")
    engine = plan_engine(from_options(str(qwen), {}), rates)
    result = World(Trace("", (single("a", 32_768, 0),)), engine, rates).run()
    assert result.ttft_s == pytest.approx([1.319], rel=0.05)
    assert engine.weight_bytes == pytest.approx(16.38e9, rel=0.01)
    # 0.9 of the GPU's memory, less weights and the largest step: 144 KB a token.
    assert engine.core.hbm_pages * 16 * 147_456 == pytest.approx(0.9 * 149.25e9 - 16.38e9 - 2.04e9, rel=0.01)


def test_shipped_rates_are_the_fit_that_they_name() -> None:
    rows = json.loads((RESULTS / "2026-11-24-h200-prefill.json").read_text())["rows"][:3]
    measured = [(r["requests"], r["prompt"], r["decode_step_ms"]["median"]) for r in rows] + [(32, 8_192, 13.7)]
    kv_gb = [n * (prompt + 48) * 147_456 / 1e9 for n, prompt, _ in measured]        # as they are halfway
    took = np.array([ms for *_, ms in measured])
    terms = np.array([(1.0, n, gb) for (n, *_), gb in zip(measured, kv_gb, strict=True)])
    (step, request, gb), *_ = np.linalg.lstsq(terms / took[:, None], np.ones(4), rcond=None)
    rates = read_rates("h200")
    assert rates.request_us == pytest.approx(1e3 * request, rel=0.01)
    assert rates.kv_bytes_s == pytest.approx(1e12 / gb, rel=0.01)
    assert rates.step_us / 1e6 + 15.134e9 / rates.weights_bytes_s == pytest.approx(step / 1e3, rel=0.01)
    assert rates.prompt_flops_s == pytest.approx(1e12 * (rows[1]["prefill_tflops"] + rows[2]["prefill_tflops"]) / 2,
                                                 rel=0.01)
    assert set(rates.estimated) == {"step_us", "save_bytes_s", "store_read_bytes_s", "store_write_bytes_s", "store_us",
                                    "cached_us", "memory_bytes"}


def test_what_a_selection_reads_is_less_than_all() -> None:
    groups = (CacheGroup(name="full", page_bytes=160), CacheGroup(name="index", page_bytes=16, selector=True),
              CacheGroup(name="window", page_bytes=160, window=32))
    assert kv_read(groups, PAGE, 1_000, 0) == 10 * 1_000 + 1_000 + 10 * 32
    assert kv_read(groups, PAGE, 1_000, 64) == 10 * 64 + 1_000 + 10 * 32


# ---------------------------------------------------------------- files, grids, the command
def test_rates_without_a_source_or_with_another_unit_are_refused(tmp_path: Path) -> None:
    given = json.loads((Path(read_rates.__code__.co_filename).parent / "machines" / "h200.json").read_text())
    assert parse(given, "x") == read_rates("h200") and set(given["rates"]) == set(NUMBERS)
    for change, message in (({"unit": "ms a step"}, "step_us needs value"), ({"source": ""}, "step_us needs value"),
                            ({"value": -1}, "step_us is -1")):
        wrong = {**given, "rates": {**given["rates"], "step_us": {**given["rates"]["step_us"], **change}}}
        with pytest.raises(ConfigError, match=message):
            parse(wrong, "x")
    with pytest.raises(ConfigError, match="step is not known"):
        parse({**given, "rates": {**given["rates"], "step": {}}}, "x")
    with pytest.raises(ConfigError, match=r"--rates h300.*one of h200"):
        read_rates("h300")


def test_a_grid_is_every_combination() -> None:
    found = points("host=64G..256G,engines=1,2,budget=0")
    assert [(p.host, p.engines) for p in found] == [(n << 30, e) for n in (64, 128, 256) for e in (1, 2)]
    assert points(None) == [Point()] and str(found[0]) == "host=64GiB budget=0"
    for wrong in ("rows=3", "3", "host=4..2", "engines=0", "host=1x", "host=1,host=2"):
        with pytest.raises(ConfigError, match="--grid"):
            points(wrong)


def test_the_knee_is_the_least_size_that_finds_nearly_all() -> None:
    def result(cached: int) -> Result:
        return Result(prompt_tokens=1_000, host_tokens=cached)

    done = [(Point(host=n << 30), result(cached)) for n, cached in ((64, 500), (128, 785), (256, 800))]
    assert knees(done) == ["knee: host=128GiB (0.785 of the prompt tokens)"]
    assert "more may help" in knees(done[:2])[0]


def test_the_command_prints_a_line_for_each_grid_point(qwen: Path, tmp_path: Path,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    words = ["plan", str(qwen), "--agents", "2", "--turns", "3", "--scale", "64", "--grid", "host=0,100G",
             "--kv-cache-memory-bytes", "45G", "--output-json", str(out)]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "| host=0 " in shown and "| host=100GiB " in shown and "knee: host=" in shown
    assert max(map(len, shown[shown.index("| grid"):shown.index("by tier:")].splitlines())) < 120
    first, second = json.loads(out.read_text())["points"]
    assert first["hits"] < second["hits"] and second["hits_host"] > 0 and first["ttft_p50_ms"] > 0


@pytest.mark.parametrize(("words", "message"), [
    (["--grid", "storage=1T"], "needs a host tier"), (["--tensor-parallel-size", "2"], "does not model"),
    (["--kv-cache-memory-bytes", "1T"], "does not fit")])
def test_the_command_refuses_what_is_not_modelled_or_does_not_fit(qwen: Path, words: list[str], message: str,
                                                                 capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(qwen), "--agents", "1", "--turns", "1", "--scale", "64", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_fleet_is_extrapolated_and_says_how_far_smaller_parts_of_it_differ(
        qwen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", str(qwen), "--agents", "16", "--turns", "3", "--scale", "128", "--kv-cache-memory-bytes", "45G"]
    assert main([*words, "--fleet", "8", "--grid", "engines=2,4"]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("8 engines, from 4: hits ")]
    assert "; with 2 hits differ by 0.0" in line
    assert main([*words, "--fleet", "8", "--grid", "engines=9"]) == 2
    assert "--fleet is 8: at least the engines of --grid" in capsys.readouterr().err


def test_flags_of_a_plan_need_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--agents", "1", "--grid", "host=1G"]) == 2
    assert "--grid needs a MODEL" in capsys.readouterr().err


# ---------------------------------------------------------------- what is refused
def test_a_plan_in_which_every_request_is_refused_fails_and_names_the_limit(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    words = ["plan", "demo", "--agents", "2", "--turns", "2", "--scale", "100", "--output-json", str(out)]
    assert main([*words, "--routing", "round-robin", "--fleet", "1"]) == 2
    shown = capsys.readouterr()
    [line] = [line for line in shown.err.splitlines() if line.startswith("penstock: error: ")]
    assert "4 of 4 requests refused" in line and "context length is 8,192 (--max-model-len" in line
    assert "nan" not in shown.err + shown.out

    def no_constant(name: str) -> None:
        raise AssertionError(name)

    found = json.loads(out.read_text(), parse_constant=no_constant)
    assert found["points"][0]["ttft_p50_ms"] is None and found["points"][0]["refused"] == 4
    assert (found["fleet"], found["routing"]) == (1, "round-robin")


def test_a_plan_warns_of_what_pools_and_context_refuse(qwen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", str(qwen), "--agents", "1", "--turns", "4", "--scale", "64"]
    assert main([*words, "--grid", "device=1G,8G,64G"]) == 0
    shown = capsys.readouterr()
    assert "| - -  " in shown.out and "nan" not in shown.out
    first, second = [line for line in shown.err.splitlines() if "warning" in line]
    assert "device=1GiB: 4 of 4 requests" in first and "device=8GiB: 3 of 4 requests" in second
    assert "the KV pools hold 58," in second and "(--kv-cache-memory-bytes, or device in --grid)" in second
    assert main([*words, "--max-model-len", "40000"]) == 0
    assert "3 of 4 requests refused" in (err := capsys.readouterr().err) and "context length is 40,000" in err


@pytest.mark.parametrize(("grid", "message"), [
    ("device=1T,64G", "--grid device=1T,64G: --kv-cache"),
    ("host=64G,0,storage=1T", "--grid host=64G,0,storage=1T: st"),
    ("engines=1.5", "'1.5' is not a whole number"), ("engines=1..1000000", "engines=1..1000000: at most 10,000"),
    ("budget=2K", "'2K' is not a whole number")])
def test_a_grid_that_cannot_be_is_shown_as_it_was_typed(qwen: Path, grid: str, message: str,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(qwen), "--agents", "1", "--turns", "1", "--scale", "64", "--grid", grid]) == 2
    err = capsys.readouterr().err
    assert message in err and ": hits " not in err, "nothing ran before"


def test_the_first_commands_of_the_guide_run_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "planning-capacity.md").read_text()
    block = guide.split("```sh\n")[1].split("```")[0].replace("\\\n", "")
    commands = [shlex.split(line, comments=True) for line in block.splitlines()]
    assert len(commands) == 2 and all(words[:2] == ["penstock", "plan"] for words in commands)
    for words in commands:
        assert main(words[1:]) == 0
        shown = capsys.readouterr()
        assert "warning" not in shown.err and "nan" not in shown.out
    assert "| host=32GiB | 0.7" in shown.out
