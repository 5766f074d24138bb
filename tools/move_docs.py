"""Moves documents to their places in the tree of November 2026, and rewrites what names them.

    python tools/move_docs.py [--generated]

Branches that began before the move run it once, before they merge. What has moved already is left alone.
`--generated` moves what `make docs` writes too.
"""
from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "install.md": "getting-started/install.md", "first-hour.md": "getting-started/quickstart.md",
    "clients.md": "getting-started/clients.md", "page-light.png": "getting-started/page-light.png",
    "page-dark.png": "getting-started/page-dark.png", "sparse.md": "guides/sparse-decode.md",
    "selection.md": "guides/sparse-decode-quality.md", "hot-buffer.png": "guides/hot-buffer.png",
    "storage.md": "guides/kv-storage.md", "pairs.md": "guides/disaggregation.md",
    "lanes.md": "guides/parallelism.md", "nodes.md": "guides/multi-node.md", "engines.md": "guides/routers.md",
    "speculation.md": "guides/speculative-decoding.md", "grafana.json": "guides/grafana.json",
    "http.md": "reference/http-api.md", "adr/README.md": "design/adr/README.md",
}
GENERATED = {"flags.md": "reference/flags.md", "combinations.md": "reference/compatibility.md",
             "models.md": "reference/models.md"}
# File and title of each decision, by its number.
DECISIONS = {
    "0001": ("command-line-on-argparse", "Our own command line, on argparse"),
    "0002": ("enter-through-loading-and-prefill", "Every request enters its slot through LOADING and PREFILL"),
    "0003": ("preemption-copies-the-partial-block", "Preemption copies the partial block; full blocks stay cached"),
    "0004": ("reference-counts-and-pins", "Reference counts on prefix-tree nodes, pins on copies, none in pools"),
    "0005": ("cpu-executor-in-the-loop-thread", "The CPU executor runs steps in the engine loop's thread"),
    "0006": ("chat-templates-in-a-process", "Chat templates render in a process with limits"),
    "0007": ("cpu-kernels-in-c", "Small CPU kernels in C, compiled at the first start"),
    "0008": ("api-and-engine-process", "API process and engine process over a socket pair"),
    "0009": ("page-tables-with-two-columns", "Page tables with a device column and a host column"),
    "0010": ("grants-are-moves", "A grant of pages to a remote instance is a Move"),
    "0011": ("admission-and-preemption-order", "Admission and preemption order, with a bounded wait"),
    "0012": ("damaged-kv-leaves-the-prefix-cache", "KV computed from damaged KV leaves the prefix cache"),
    "0013": ("storage-share-of-the-host-pool", "Storage traffic takes at most an eighth of the host pool"),
    "0014": ("time-limits-per-phase", "Time limits per phase"),
    "0015": ("page-layout-per-cache-group", "Page layout per cache group, page-major pools"),
    "0016": ("executor-over-ranks", "One executor sends plans to all ranks"),
    "0017": ("promotion-moves-and-pipeline-shares",
             "One Move per cache group for a promotion; one share of the requests per pipeline step"),
    "0019": ("sparse-budget-per-request", "The sparse budget belongs to a request and to the key of its pages"),
    "0020": ("block-selection-and-hot-buffers",
             "Block selection by key min/max; a hot-buffer map per layer and KV head"),
    "0022": ("attention-interface", "Attention layers declare their cache shape and request top-k selection"),
    "0024": ("asynchronous-scheduling-on-cuda", "Asynchronous scheduling on CUDA"),
    "0025": ("prefill-chunk-lengths", "Prefill chunks in few lengths"),
    "0026": ("long-texts-tokenized-in-a-process", "Long texts are tokenized in a process"),
    "0029": ("pipeline-stages-are-processes", "Each pipeline stage is a process that executes a log of plans"),
    "0032": ("one-select-in-the-engine-loop", "One select waits for all events of the engine loop"),
    "0034": ("one-authenticated-stream", "One authenticated stream between prefill and decode instance"),
    "0035": ("gpu-sampling-and-measured-memory", "Sampling on the GPU; memory measured by the largest step"),
    "0036": ("host-decode-in-cuda-graphs", "Sparse decode from host memory in CUDA graphs"),
    "0037": ("offloaded-mla-kv", "Offloaded MLA KV is read entry by entry"),
    "0041": ("cpu-weights-in-panels", "CPU weights in panels, in their stored type"),
    "0042": ("block-score", "The score of a block lies between its key bounds"),
    "0044": ("experts-and-fp8-weights-on-gpu",
             "One operation for all experts of a layer; fp8 weights stay fp8 on a GPU"),
    "0045": ("steps-wait-for-small-loads", "Steps wait for small host loads, layer by layer"),
    "0046": ("prefill-attention-on-amx", "Prefill attention in C on AMX"),
    "0047": ("prefill-attention-in-one-call", "One attention call per layer for all prompts of a step"),
    "0048": ("one-path-for-indexer-models", "One path for models with an indexer, resident or offloaded"),
    "0049": ("every-tp-rank-samples", "Every tensor-parallel rank samples, without a protocol"),
    "0050": ("prefix-aware-routing", "The API process routes prompts to engines by cached prefixes"),
    "0051": ("grammar-masks-next-to-the-sampler", "Grammar masks from output tokens, next to the sampler"),
    "0052": ("one-stream-per-node", "One stream per node to node 0"),
    "0053": ("fp8-kv-entries-with-scales", "fp8 KV entries are bytes with their scales inside"),
    "0054": ("one-gpu-per-rank", "One GPU per rank; all-reduce by NCCL and peer-to-peer memory"),
    "0055": ("storage-wait-and-objects", "A minimum wait for storage, and objects of whole pages"),
    "0056": ("table-edits-launched-ahead", "Page-table edits are launched ahead, in one scatter"),
    "0057": ("recurrent-states-in-cache-groups", "Recurrent states in up to four cache groups"),
    "0060": ("draft-tokens-as-decode-positions", "Draft tokens are additional decode positions"),
    "0061": ("mtp-kv-cache", "The KV of an MTP head is a cache group"),
    "0062": ("kernels-outside-triton", "Seven GPU kernels outside Triton"),
    "0063": ("models-by-hub-name", "Models by hub name; cached models need no network"),
    "0065": ("openmp-threads-sleep-early", "Waiting OpenMP threads sleep after 0.1 ms"),
    "0067": ("non-finite-kv", "Non-finite KV reaches only the queries that see it"),
    "0070": ("text-of-multimodal-checkpoints", "The text model of a multimodal checkpoint"),
    "0072": ("own-chat-templates", "Our own chat template where a model publishes a program"),
    "0073": ("tool-call-arguments-in-history", "Tool-call arguments in a chat history are objects"),
    "0074": ("max-tokens-beyond-the-context", "max_tokens beyond the context is refused; clipping is a flag"),
    "0076": ("fp8-indexer-queries", "fp8 indexer keys have fp8 queries"),
    "0077": ("start-up-runs-every-kind-of-step", "Start-up runs one step of each kind"),
}
TEXT = {".md", ".py", ".toml", ".txt", ".json", ".yml", ".yaml", ".c", ".h", ".cu", ".cuh", ""}


def tracked() -> list[str]:
    run = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in run.stdout.splitlines() if (ROOT / name).is_file()]


def moves(generated: bool) -> dict[str, str]:
    """Where each document was and is, of those that the tree still has in the old place."""
    found = {f"docs/{old}": f"docs/{new}" for old, new in {**PAGES, **(GENERATED if generated else {})}.items()}
    for name in tracked():
        if at := re.fullmatch(r"docs/adr/(\d{4})-[\w-]+\.md", name):
            slug = DECISIONS[at[1]][0] if at[1] in DECISIONS else Path(name).stem[5:]
            found[name] = f"docs/design/adr/{at[1]}-{slug}.md"
    return found


def relinked(text: str, old: str, new: str, moved: dict[str, str]) -> str:
    """The text of a Markdown file that was at `old` and is at `new`: its relative links lead where they led."""
    def link(match: re.Match[str]) -> str:
        target, anchor = match[1], match[2] or ""
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        aim = os.path.normpath(os.path.join(os.path.dirname(old), target))
        if aim not in moved and not (ROOT / aim).exists():
            return match[0]
        return f"]({os.path.relpath(moved.get(aim, aim), os.path.dirname(new) or '.')}{anchor})"

    return re.sub(r"\]\(([^)#\s]+)(#[^)\s]*)?\)", link, text)


def main() -> None:
    moved = moves("--generated" in sys.argv)
    texts = {name: (ROOT / name).read_text() for name in tracked()
             if Path(name).suffix in TEXT and name not in ("tools/move_docs.py", "LICENSE")}
    for old, new in moved.items():
        if (ROOT / old).exists():
            (ROOT / new).parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(["git", "mv", old, new], cwd=ROOT, check=True)
    names = sorted(moved, key=len, reverse=True)
    for name, text in texts.items():
        at, out = moved.get(name, name), text
        if name.endswith(".md"):
            out = relinked(out, name, at, moved)
        for old in names:
            out = re.sub(rf"(?<![\w/]){re.escape(old)}(?![\w])", moved[old], out)
        out = re.sub(r"(?<![\w/])docs/adr\b", "docs/design/adr", out)
        if found := re.fullmatch(r"docs/design/adr/(\d{4})-.*", at):
            out = re.sub(r"\A# .*", f"# {found[1]}: {DECISIONS[found[1]][1]}", out) if found[1] in DECISIONS else out
        if out != text:
            (ROOT / at).write_text(out)


if __name__ == "__main__":
    main()
