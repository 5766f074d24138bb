"""README is short, begins with a command, and has no figure that `bench/results` does not; what
docs/performance.md says is what was measured."""
from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import models_reference
import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
LINES_MAX = 120
# Numbers of names and versions, not of measurements.
NAMES = ("Python 3.11", "Apache-2.0", "SGLang 0.5.17")


@cache
def results(name: str) -> Any:
    """The newest file of that name: its rows, or for a CPU its results."""
    found = json.loads(sorted((ROOT / "bench/results").glob(f"*-{name}.json"))[-1].read_text())
    return found["rows"] if "rows" in found else found["results"]


def ratio(name: str, work: str) -> float:
    """Of the pairs of a run, ours over transformers': their median."""
    both = results(name)[work]
    return median(a / b for a, b in zip(both["penstock"], both["transformers"], strict=True))


(HOSTED, CODED), LOADED = results("h100-hosted")[:2], results("h200-loadback")[0]
[HISPARSE] = [row for row in results("h200-latent") if (row["work"], row["batch"]) == ("W1", 16)]
ONE = "decode, 1 stream"
PERFORMANCE = (ROOT / "docs/performance.md").read_text()
[COSTS] = re.findall(r"\| 688 \| 1/8 \| [\d.]+ \| \+([\d.]+) % \|", PERFORMANCE)
[READ] = re.findall(r"\| a step reads \| of ([\d,]+) tokens \|", PERFORMANCE)
# In the order in which README has them.
FIGURES = {
    "tokens, of which the demo model reads an eighth": READ,
    "per cent of perplexity that costs": COSTS,
    "requests": f"{HOSTED['requests']}",
    "context": f"{HOSTED['context']:,}",
    "GPU memory for KV": f"{HOSTED['device_kv_bytes'] / 1e9:.0f}",
    "sparse decode, tokens/s": f"{1e3 * HOSTED['requests'] / HOSTED['step_ms']['hosted']['median']:.0f}",
    "full attention of the one that fits": f"{1e3 / HOSTED['step_ms']['dense']['median']:.0f}",
    "requests of a DSA model": f"{HISPARSE['batch']}",
    "their context": f"{HISPARSE['context']:,}",
    "their hot buffers": f"{HISPARSE['hot_tokens']:,}",
    "their tokens/s": f"{HISPARSE['tokens_s']:,.0f}",
    **{f"SGLang's, {of}": f"{n:,}" for peer in HISPARSE["peers"].values()
       for of, n in zip(("least", "most"), peer, strict=True)},
    "a CPU": f"{median(results('cpu-float32-native')[ONE]['penstock']):.0f}",
    "transformers there": f"{median(results('cpu-float32-native')[ONE]['transformers']):.0f}",
}


def numbers(text: str) -> list[str]:
    """Those that stand for themselves: not of code, links, tables of code, or names such as GLM-5."""
    text = re.sub(r"(?s)```.*?```|`[^`]*`|\]\([^)]*\)", " ", text)
    for name in NAMES:
        text = text.replace(name, " ")
    return re.findall(r"(?<![\w.-])\d[\d,.]*\d|(?<![\w.-])\d", text)


def test_readme_is_short_and_begins_with_a_command() -> None:
    lines = README.splitlines()
    assert len(lines) <= LINES_MAX
    assert any(line.startswith("make serve") for line in lines[:15])


def test_the_table_of_models_is_what_the_code_says() -> None:
    assert models_reference.view() in README and models_reference.put_into(README) == README, "make docs"


def test_readme_has_no_number_that_was_not_measured() -> None:
    assert numbers(README) == list(FIGURES.values())


@pytest.mark.parametrize(("text", "found"), [
    ("GLM-5, Qwen2.5 and an H200", []), ("**3.7 times**, 1,024 and 5", ["3.7", "1,024", "5"]),
    ("`--pp 2`, [x](a/2.md)\n```\n4\n```", []), ("7.", ["7"])])
def test_what_counts_as_a_number(text: str, found: list[str]) -> None:
    assert numbers(text) == found


WORKS = {"decode, 1 stream": "decode, 1 stream", "decode, 8 streams": "decode, 8 streams",
         "prefill 512": "prefill, 512 tokens", "prefill 2048": "prefill, 2,048 tokens"}


@pytest.mark.parametrize("run", ["float32-native", "float32-avx2", "bfloat16-native", "bfloat16-avx2"])
@pytest.mark.parametrize(("machine", "of"), [("EPYC", "cpu-"), ("Xeon", "cpu-amx-")])
def test_rows_of_the_cpus_are_medians_of_what_was_measured(machine: str, of: str, run: str) -> None:
    for work, title in WORKS.items():
        ours = median(results(of + run)[work]["penstock"])
        row = (machine, run.replace("-", ", "), title, f"{ours:,.0f}", f"{ratio(of + run, work):.1f}")
        assert f"| {' | '.join(row)} |" in PERFORMANCE.splitlines()


def test_rows_of_the_gpu_are_what_was_measured() -> None:
    decode = {(row.get("requests"), row.get("prompt")): row for row in results("h200-resident")}
    one, eight, many = (decode[key] for key in ((1, 512), (8, 8192), (32, 8192)))
    prefill = {(row.get("requests"), row.get("prompt")): row for row in results("h200-prefill")}
    prompts, prompt = prefill[8, 8192], prefill[1, 32768]
    crowds = {row["crowd"]: median(row["first_token_p50_ms"]) for row in results("h200-crowd")
              if "crowd" in row}
    sampled, [experts, experts_32] = results("h200-sampled")[0], results("h200-experts")[-2:]
    h100, hosted = results("h100-experts")[-2], (results("h200-hosted")[0], HOSTED, CODED)
    [steps], [ready, _], [fits] = results("h200-steps"), results("h200-ready-b"), results("h200-fits")
    for figure in (
            f"{one['decode_tokens_s']:.0f} tokens/s | {one['decode_share']:.2f}",
            f"{eight['decode_step_ms']['median']:.1f} ms a step | {eight['decode_share']:.2f}",
            f"{many['decode_step_ms']['median']:.1f} ms a step | {many['decode_share']:.2f}",
            f"{sampled['decode_tokens_s']:.0f} tokens/s | {sampled['decode_share']:.2f}",
            f"{prompts['prefill_tflops']:.0f} TFLOP/s | {prompts['prefill_share']:.2f}",
            f"{prompts['prefill_first_s']:.2f} s, later {prompts['prefill_s']['median']:.2f} s |",
            f"{prompt['prefill_tflops']:.0f} TFLOP/s | {prompt['prefill_share']:.2f}",
            f"{crowds[1]:.1f}, {crowds[64]:.0f}, {crowds[256]:.0f} ms |",
            f"{LOADED['computed_over_loaded']['median']:.1f} times as fast |",
            *(figure for of in hosted for figure in (
                f"{of['step_ms']['hosted']['median']:.1f} ms a step | {of['share_of_bound']:.2f}",
                f"{of['tokens_s_over_dense']:.1f} times |")),
            f"{fits['speed_ratio']['median']:.2f} of the speed |",
            f"{100 * steps['idle_share']:.1f} % |",
            f"{ready['cold']['ready_s']:.1f} s |", f"{ready['warm']['ready_s']:.1f} s |",
            f"{experts['decode_tokens_s']:,.0f} tokens/s | {experts['decode_share']:.2f}",
            f"{experts_32['decode_tokens_s']:,.0f} tokens/s | {experts_32['decode_share']:.2f}",
            f"{h100['decode_tokens_s']:,.0f} tokens/s | {h100['decode_share']:.2f}"):
        assert f"| {figure}" in PERFORMANCE, figure
    assert all(f"hit rate {of['hit_rate']:.2f} |" in PERFORMANCE for of in hosted)
