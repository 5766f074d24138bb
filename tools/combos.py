"""What works with what, asked of the refusals themselves and of the report of what tests have run.

    python tools/combos.py [WORD ...] [--into FILE] [--ran FILE ...]

A combination is refused if a table of refusals says so, with that entry's reason; works ("yes") if a test of it ran,
as `tests/data/cells.json` says; is covered if each two of its words ran together there; else it is accepted and no
test has tried it. Writes docs/reference/compatibility.md
and a small view of it into README; `make docs` does both, a test compares them. --ran takes what `pytest --cells`
wrote into the report.
"""
from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from cells import DIMENSIONS, REPORT, Cell, Pair, cells, combinations, covered, merged, pairs, ran, report, written
from flags_reference import flags_of

from penstock.config.base.machine import Machine
from penstock.config.settings.cli import from_options
from penstock.config.settings.refuse import REFUSED
from penstock.config.settings.refuse_model import OF_MODEL, WORDS, ModelFacts
from penstock.config.settings.unbuilt import UNBUILT
from penstock.model.weights import gguf_config

# A machine on which only what is refused by design is refused.
_MACHINE = Machine(system="Linux", machine="x86_64", python="3", cpu="any", features=("avx2", "fma"), cores=8,
                   memory_total=1 << 40, memory_available=1 << 40, gpus=("any",), torch_cuda="any")
_FAMILY = {"ordinary": "llama", "selecting": "llama", "fp8kv": "llama", "latent": "deepseek_v32",
           "experts": "qwen3_moe", "windows": "gpt_oss", "states": "qwen3_next", "minimax-m3": "minimax_m3"}
_MOE = ("latent", "experts", "windows", "minimax-m3")
_DTYPE = {"float32": "float32", "bfloat16": "bfloat16", "packed": "gguf"}         # else auto


@dataclass(frozen=True, slots=True)
class Answer:
    """`status` is yes, covered, refused or not tested; `why` the test and its run, the combinations in which each two
    of its words ran together, or the reasons with the files that refuse."""

    status: str
    why: tuple[str, ...] = ()


def options(cell: Cell) -> dict[str, object]:
    """The flags that ask for it."""
    hosted, tier = cell.place == "hosted", cell.feature in ("tier", "paused", "stored")
    asked: dict[str, object] = {
        "device": {"cpu": "cpu", "gpu": "cuda"}[cell.device], "dtype": _DTYPE.get(cell.weights, "auto"),
        "kv_cache_memory_bytes": "1G", "kv_offloading_size": "auto" if hosted or tier else "0",
        "prefix_cache": True,                   # as by default
        "host_decode": "always" if hosted else "off"}
    if cell.kind == "selecting" or (cell.kind in ("fp8kv", "experts", "windows", "states") and hosted):
        asked["sparse_top_k"] = 512
    if cell.kind == "fp8kv":
        asked["kv_cache_dtype"] = "fp8"
    if cell.feature == "stored":
        asked["kv_storage"] = "file:///DIR"
    if cell.across in ("pp", "both"):
        asked["pp"] = 2
    if cell.across == "tp":
        asked["tp"] = 2
    if cell.across == "nodes":
        asked |= {"pp": 2, "tp": 2, "nnodes": 2, "dist_init_addr": "127.0.0.1:20000"}
    if cell.across in ("pair", "both"):
        asked |= {"prefill": 1, "decode": 1}
    return asked


def facts(cell: Cell) -> ModelFacts:
    """What a model of its kind says of itself."""
    latent, blocks = cell.kind == "latent", cell.kind == "minimax-m3"
    return ModelFacts(name="NAME", load_format="gguf" if cell.weights in ("gguf", "packed") else "safetensors",
                      layers=32, topk=2048 if latent or blocks else 0, block=128 if blocks else 1,
                      kv_heads=not latent, experts=64 * (cell.kind in _MOE),
                      state_bytes=(1 << 18) * (cell.kind == "states"))


def refusals_of(cell: Cell) -> Iterator[str]:
    """Reason and file of each refusal that it meets."""
    config, model = from_options("NAME", options(cell)), facts(cell)
    words = _MACHINE.words | WORDS
    settings = "src/penstock/config/settings"
    for file, found in (("refuse.py", [r for r in REFUSED if r.when(config, _MACHINE)]),
                        ("refuse_model.py", [r for r in OF_MODEL if r.when(config, model)])):
        for r in found:
            yield f"{flags_of(r.fields)}: {r.why.format_map(words)} (`{settings}/{file}`)"
    if model.load_format == "gguf" and _FAMILY[cell.kind] not in dict(gguf_config.ARCHITECTURES.values()):
        yield (f"a GGUF of another architecture than {', '.join(gguf_config.ARCHITECTURES)} "
               "(`src/penstock/model/weights/gguf_config.py`)")


@cache
def _proven() -> dict[Cell, str]:
    return ran()


@cache
def _together(device: str) -> dict[Pair, Cell]:
    """Of each two words that ran together there, one combination that has them."""
    return {pair: cell for cell in reversed(_proven()) if cell.device == device for pair in pairs(cell)}


@cache
def answer(cell: Cell) -> Answer:
    """Whether it works, as the code and the tests say. A run of what is refused is a mistake of ours."""
    why, test = tuple(refusals_of(cell)), _proven().get(cell)
    assert not (why and test), f"{test} covers {cell}, which is refused: {why}"
    if why or test:
        return Answer("refused", why) if why else Answer("yes", (str(test),))
    found = [_together(cell.device).get(pair) for pair in pairs(cell)]
    by = dict.fromkeys(" ".join(one) for one in found if one)
    return Answer("covered", tuple(by)) if all(found) else Answer("not tested")


# ---------------------------------------------------------------- the small view
_START, _END = "<!-- combos: written by `make docs` -->", "<!-- combos: end -->"
_SHOWN = {"yes": "tested", "refused": "no"}
_ORDINARY, _HOSTED = {"kind": "ordinary"}, {"kind": "selecting", "place": "hosted"}
_MANY = {"kind": "selecting experts latent", "place": "hosted"}
_VIEW: tuple[tuple[str, tuple[dict[str, str], ...]], ...] = (
    ("full attention, KV cache on the device", (_ORDINARY,)),
    ("sparse decode of GQA models (`--sparse-top-k`), KV on the device or in host memory",
     ({"kind": "selecting", "place": "resident hosted"},)),
    ("DSA models (DeepSeek-V3.2, GLM-5), KV on the device or in host memory",
     ({"kind": "latent", "place": "resident hosted"},)),
    ("fp8 KV (`--kv-cache-dtype fp8`)", ({"kind": "fp8kv", "place": "resident hosted"},)),
    ("MoE; hybrid models with recurrent states (Qwen3-Next and others)", ({"kind": "experts states"},)),
    ("KV offloading to host memory, preemption by swap", tuple(
        {**one, "feature": "tier paused"} for one in (_ORDINARY, _HOSTED))),
    ("prefix caching over device and host", tuple({**one, "feature": "cache"} for one in (_ORDINARY, _HOSTED))),
    ("KV storage (`--kv-storage`): files; S3, Valkey and Mooncake have tests on a CPU",
     tuple({**one, "feature": "stored"} for one in (_ORDINARY, _HOSTED))),
    ("pipeline parallelism (`--pp`)", tuple({**one, "across": "pp"} for one in (_ORDINARY, _HOSTED))),
    ("tensor and expert parallelism (`--tp`, `--ep`)", tuple({**one, "across": "tp"} for one in (_ORDINARY, _MANY))),
    ("several machines (`--nnodes`)", tuple(
        {**one, "across": "nodes"} for one in ({"kind": "ordinary latent"}, _MANY))),
    ("prefill/decode disaggregation", tuple({**one, "across": "pair"} for one in (_ORDINARY, _HOSTED))),
    ("bfloat16 weights", ({**_ORDINARY, "weights": "bfloat16"},)),
    ("fp8 weights in blocks or per channel, int4, NVFP4", ({**_ORDINARY, "weights": "fp8 channel int4 nvfp4"},)),
    ("GGUF kept packed (`--dtype gguf`)", ({**_ORDINARY, "weights": "packed"},)),
)


def _shown(cell: Cell) -> str:
    """The word of the small view for a cell."""
    status = answer(cell).status
    return _SHOWN.get(status, status)


def view() -> str:
    """The table of README: `tested` where all that a line names is tested."""
    lines = ["| | CPU | GPU |", "|---|---|---|"]
    for title, rows in _VIEW:
        asked = [cell for row in rows for cell in covered(**row)]
        found = [{_shown(cell._replace(device=device)) for cell in asked} for device in DIMENSIONS["device"]]
        cells = ["in part" if {"tested", "not tested"} <= one else " or ".join(sorted(one, reverse=True))
                 for one in found]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def put_into(text: str) -> str:
    """A document with the view between its two marks."""
    return re.sub(f"(?s){re.escape(_START)}.*{re.escape(_END)}", f"{_START}\n{view()}\n{_END}", text)


# ---------------------------------------------------------------- the whole
_INTRO = """\
# Combinations

Written by `make docs`; a test compares it. **yes**: a test of it ran and passed, in a run below. **no**: it is refused
with its reason, before a weight is read. **covered**: each two of its words ran together in some of these runs.
**not tested**: it is accepted, and no test shows that it works. Rows with equal cells are one row.

There are {total} combinations: {counts}. `python tools/combos.py WORD ...` prints those of some words, each with its
test and run, the combinations that cover it, or its reasons:

| | words |
|---|---|
{dimensions}"""


@dataclass(slots=True)
class _Notes:
    """What a table points at, numbered in the order of its first use."""

    letter: str
    texts: list[str] = field(default_factory=list)

    def __call__(self, text: str) -> str:
        if text not in self.texts:
            self.texts.append(text)
        return f"{self.letter}{self.texts.index(text) + 1}"


def document() -> str:
    """docs/reference/compatibility.md, ending in a newline."""
    counts = Counter(answer(cell).status for cell in cells())
    reasons = _Notes("r")
    titles = {"kind": "model", "place": "decode reads", "feature": "with", "across": "processes"}
    dimensions = "\n".join(f"| {titles.get(name, name)} | " + ", ".join(
        f"`{word}` {text}" if text not in ("-", word) else f"`{word}`" for word, text in words.items()) + " |"
        for name, words in DIMENSIONS.items())
    lines = [_INTRO.format(total=counts.total(), dimensions=dimensions,
                           counts=", ".join(f"{n} {status}" for status, n in sorted(counts.items())))]
    lines += ["", "## Models, tiers and engines, with float32", ""]
    lines += _table(("kind", "place", "feature"), reasons)
    lines += ["", "## Weights, with nothing else", ""]
    lines += _table(("kind", "weights"), reasons)
    lines += ["", "## Runs", "", "| commit | date | device | combinations |", "|---|---|---|---|"]
    lines += [f"| {run['commit']} | {run['date']} | {run['device']} | {len(combinations(run))} |" for run in report()]
    lines += ["", "## Refusals", "", *(f"- {reasons(text)}: {text}" for text in reasons.texts)]
    lines += ["", "## Not built", "", "Refused by name; [flags.md](flags.md) has the spellings.", ""]
    lines += [f"- {feature}" for feature in dict.fromkeys(entry.feature for entry in UNBUILT) if feature]
    return "\n".join(lines) + "\n"


def _table(names: tuple[str, ...], reasons: _Notes) -> Iterator[str]:
    columns = list(itertools.product(DIMENSIONS["across"], DIMENSIONS["device"]))
    heads = [f"{DIMENSIONS['across'][a]}, {DIMENSIONS['device'][d]}" for a, d in columns]
    titles = {"kind": "model", "place": "decode reads", "feature": "with", "weights": "weights"}
    yield f"| {' | '.join((*(titles[name] for name in names), *heads))} |"
    yield "|---" * (len(names) + len(heads)) + "|"
    rows = []
    for row in itertools.product(*(DIMENSIONS[name] for name in names)):
        plain = Cell("ordinary", "resident", "plain", "one", "cpu", "float32")._replace(
            **dict(zip(names, row, strict=True)))
        shown = []
        for across, device in columns:
            found = answer(plain._replace(across=across, device=device))
            notes = ", ".join(map(reasons, found.why)) if found.status == "refused" else ""
            shown.append(f"{'no' if found.status == 'refused' else found.status} {notes}".strip())
        rows.append(([(DIMENSIONS[name][word],) for name, word in zip(names, row, strict=True)], shown))
    for at in reversed(range(len(names))):
        rows = _folded(rows, at)
    for words, shown in rows:
        yield f"| {' | '.join([*map(', '.join, words), *shown])} |"


_Row = tuple[list[tuple[str, ...]], list[str]]


def _folded(rows: list[_Row], at: int) -> list[_Row]:
    """Make one row of those that differ in word `at` only."""
    found: dict[tuple[object, ...], _Row] = {}
    for words, shown in rows:
        others = tuple(word for i, word in enumerate(words) if i != at)
        first = found.setdefault((others, tuple(shown)), ([*words[:at], (), *words[at + 1:]], shown))
        first[0][at] = (*first[0][at], *words[at])
    return list(found.values())


# ---------------------------------------------------------------- the command
def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code. Without words it prints the whole document."""
    parser = argparse.ArgumentParser(description="What works with what, and which test or refusal says so.")
    known = {word: name for name, words in DIMENSIONS.items() for word in words}
    parser.add_argument("words", nargs="*", metavar="WORD", help=f"print the combinations of: {' '.join(known)}")
    parser.add_argument("--into", metavar="FILE", help="write the small view into FILE, between its marks")
    parser.add_argument("--ran", metavar="FILE", nargs="+", default=[], help="take what `pytest --cells FILE` wrote")
    args = parser.parse_args(argv)
    for file in args.ran:
        REPORT.write_text(written(merged(report(), json.loads(Path(file).read_text()))))
    if args.ran:
        return 0
    if odd := [word for word in args.words if word not in known]:
        parser.error(f"{odd[0]!r} is no word of a combination: choose from {', '.join(known)}")
    if args.into and args.words:
        parser.error("--into writes the view of README: leave the words out")
    if args.into:
        path = Path(args.into)
        path.write_text(put_into(path.read_text(encoding="utf-8")), encoding="utf-8")
    elif not args.words:
        print(document(), end="")
    for cell in cells() if args.words else ():
        if all(word in {w for w in args.words if known[w] == known[word]} or known[word] not in {
                known[w] for w in args.words} for word in cell):
            found = answer(cell)
            print("\n    ".join([f"{' '.join(cell)}: {found.status}", *found.why]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
