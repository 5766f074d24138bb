"""Core, front and rank in one process on a CUDA device, without HTTP: what the engine process does.

Weights are random and made on the device; a step's time is what the loop sees, planning included.
"""
from __future__ import annotations

import functools
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from penstock.config.request.params import SamplingParams
from penstock.config.request.selection import Selection, attention_identity, indexer_selection
from penstock.config.settings.tree import KVConfig
from penstock.core.core import Core
from penstock.core.plan import Arrived, Event, Finished, RequestId, Retired, Started, Token
from penstock.core.settings import CoreConfig
from penstock.exec.drafts.drafter import Drafter
from penstock.exec.executor import Executor
from penstock.exec.graphs.capture import buckets_of
from penstock.exec.load.backends import block_of, parts_of, selector_for
from penstock.exec.load.layout import caches_of
from penstock.exec.load.sizing import WAIT_BYTES, groups_of
from penstock.exec.sampling.grammar import Grammars
from penstock.exec.step.attend import LatentOps
from penstock.exec.worker import Worker, WorkerParts
from penstock.kernels import registry
from penstock.kernels.attention import latent_attention, paged_attention
from penstock.kernels.fused import layer
from penstock.kernels.gemm import experts, linear
from penstock.kernels.platform import probe
from penstock.model import registry as families
from penstock.model.base import value_dim_of

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 12288, "vocab_size": 151936, "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False, "hidden_act": "silu",
    "attention_bias": False,
}
FLOPS_S, LINK_BYTES_S = 790e12, 50.4e9           # measured on an H200
GREEDY = SamplingParams(temperature=0.0, max_tokens=None)


def build_model(config: dict[str, Any], dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Any:
    """Random weights, normal with 0.02, norms 1."""
    model = families.build(config, dtype=dtype, linear=functools.partial(linear.pack, backend="triton"),
                           ops=layer.OP.use("triton"), experts=experts.OP.use("triton"))
    generator = torch.Generator(device="cuda").manual_seed(seed)
    for name, shape in families.tensor_shapes(config):
        tensor = torch.ones(shape, device="cuda", dtype=dtype)
        model.load(name, tensor if len(shape) == 1 else tensor.normal_(0, 0.02, generator=generator))
    model.finish()
    return model


def hbm_bytes_s() -> float:
    """Measured, reads and writes: of an H200, and of an H100 by a copy alone."""
    return 4.27e12 if "H200" in torch.cuda.get_device_name() else 3.0e12


@dataclass
class Ran:
    """Of one `Direct.run`. `first_s`: from the start to each request's first token. `step_s`: between
    the ends of steps in which every request got a token."""

    wall_s: float
    first_s: dict[int, float] = field(default_factory=dict)
    step_s: list[float] = field(default_factory=list)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    started: dict[int, Started] = field(default_factory=dict)


class Direct:
    def __init__(self, model: Any, *, rows: int, max_len: int, hbm_tokens: int, dram_tokens: int = 0,
                 step_tokens: int = 8192, page_size: int = 16, prefix_cache: bool = False,
                 buckets: Sequence[int] = (), selection: Selection | None = None,
                 hot_tokens: int = 0, hot_most: int = 0, hosted: bool = False,
                 grammars: Grammars | None = None, kv: KVConfig | None = None,
                 drafter: Drafter | None = None, drafts: int = 0,
                 backends: Mapping[str, registry.Choice] | None = None, device: str = "cuda") -> None:
        """With a `selection` every request decodes by it, a model that chooses itself by its own; hosted: out
        of host pages even where it fits. hot_most: tokens that a hot buffer of hot_tokens grows to.
        hbm_tokens: of all that is in the device's pool, in slabs of a page of KV. kv: has its formats.
        drafts: of a row and step, at most. backends: as an engine chooses them; None: what most models here take."""
        if model.selector is not None:
            selection = indexer_selection(model.selector.tokens, model.selector.block)
        groups = groups_of(model, selection, kv)
        caches = caches_of(groups, page_size, model.dtype)
        cfg = CoreConfig(page_size=page_size, rows=rows, hbm_pages=hbm_tokens // page_size,
                         dram_pages=dram_tokens // page_size, step_tokens=step_tokens, max_len=max_len,
                         wait_pages=WAIT_BYTES[True] // caches.page_bytes if dram_tokens else 0,
                         overlap=True, prefix_cache=prefix_cache, groups=caches.groups,
                         hot_pages=hot_tokens // page_size, hot_pages_max=hot_most // page_size,
                         budget=selection.budget if selection is not None else 0,
                         always_hosted=hosted, draft_tokens=drafts, chunk_multiple=block_of(backends or {}))
        self._params, self._attention, self._selects = GREEDY, 0, False
        selector, names = selector_for(selection, model), {}
        if selection is not None:
            native = selection.native
            self._selects = hot_tokens > 0 or not native
            chosen = backends or registry.choose(probe("cuda"), ops=registry.SELECTING[selector.score])
            names = {op: choice.name for op, choice in chosen.items()}
            self._params = SamplingParams(temperature=0.0, max_tokens=None,
                                          sparse_top_k=None if native else selection.budget)
            self._attention = attention_identity(selection)
        started = time.perf_counter()
        hbm, dram = caches.pools(cfg, device)
        self.pools_s = time.perf_counter() - started
        for pool in hbm:
            pool.fill(0.0)
        if backends is None:
            attention = (LatentOps(latent_attention.OP.use("gluon"))
                         if value_dim_of(model) else functools.partial(paged_attention.prepare, backend="fa4"))
            parts = WorkerParts(model, attention, groups, selector, cfg.largest_hot, names, mask="triton")
        else:
            parts = parts_of(model, backends, selection, cfg.largest_hot, groups)
        self.rank = Worker(parts, hbm, dram, rows=rows, max_len=max_len, grammars=grammars, drafter=drafter)
        started = time.perf_counter()
        if device == "cuda":
            self.rank.capture(buckets or buckets_of(rows), width=1 + drafts)
            torch.cuda.synchronize()
        self.capture_s = time.perf_counter() - started
        self.core, self.front, self._newest = Core(cfg), Executor([self.rank]), 0

    def run(self, prompts: Sequence[Sequence[int]], max_new: int,
            every_step: Callable[[], None] = lambda: None, params: SamplingParams | None = None,
            of: int = 0, drafts: int | None = None) -> Ran:
        """All at once, to the end. every_step: called after each step that gave every request a token, or so
        many of them as `of` says; those steps are timed. drafts: as `Arrived.drafts`."""
        rids = [RequestId(self._newest + 1 + i) for i in range(len(prompts))]
        self._newest += len(prompts)
        events: list[Event] = []
        ran = Ran(0.0)
        for rid, prompt in zip(rids, prompts, strict=True):
            self.front.open(rid, tuple(prompt), params or self._params)
            events.append(Arrived(rid, tuple(prompt), max_new, selects=self._selects,
                                  attention=self._attention, drafts=drafts))
            ran.tokens[rid] = []
        left, began, last = set(rids), time.perf_counter(), None
        while left:
            while True:
                advance = self.core.advance(events)
                events = []
                for out in advance.outputs:
                    if isinstance(out, Token):
                        ran.tokens[out.rid].append(out.token)
                        ran.first_s.setdefault(out.rid, time.perf_counter() - began)
                    elif isinstance(out, Started):
                        ran.started[out.rid] = out
                    elif isinstance(out, Finished):
                        self.front.close(out.rid)
                        left.discard(out.rid)
                if advance.plan is None:
                    break
                self.front.submit(advance.plan)
            if left:
                events += self.front.poll(block=True)
                now = time.perf_counter()
                if any(isinstance(e, Retired) and len(e.tokens) == (of or len(prompts)) for e in events):
                    if last is not None:
                        ran.step_s.append(now - last)
                    last = now
                    every_step()
        ran.wall_s = time.perf_counter() - began
        return ran


def kernels_of(profiler: Any, steps: int) -> dict[str, dict[str, float]]:
    """By name, the longest first: launches a step, us a step from the end of the kernel in front, as kernels
    begin early, and its own. Copies to the host run beside kernels: they count with their own time alone."""
    seen = sorted((e for e in profiler.events() if e.device_type.name == "CUDA" and e.time_range.end > 0),
                  key=lambda e: e.time_range.end)
    found: dict[str, dict[str, float]] = {}
    last = seen[0].time_range.start if seen else 0.0
    for event in seen:
        of = found.setdefault(event.name[:60], {"a_step": 0.0, "us_a_step": 0.0, "its_own_us": 0.0})
        of["a_step"] += 1 / steps
        of["its_own_us"] += (event.time_range.end - event.time_range.start) / steps
        if "DtoH" not in event.name:
            of["us_a_step"] += (event.time_range.end - last) / steps
            last = max(last, event.time_range.end)
    return dict(sorted(found.items(), key=lambda item: -item[1]["us_a_step"]))


def show_kernels(kernels: dict[str, dict[str, float]], most: int) -> None:
    for kernel, of in list(kernels.items())[:most]:
        print(f"    {of['us_a_step']:8.1f} us ({of['its_own_us']:8.1f}) {of['a_step']:6.1f} x {kernel}",
              flush=True)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and largest."""
    return {"median": median(values), "least": min(values), "largest": max(values)}


def write(name: str, out: Path, rows: list[dict[str, Any]], shown: bool = True) -> None:
    """One JSON file: machine, commit, command, rows; printed too if it is `shown`."""
    commit = os.environ.get("COMMIT", "")
    if not commit:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True,
                                check=False).stdout.strip()
    import triton
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    machine = {"gpu": gpu, "torch": torch.__version__, "triton": triton.__version__,
               "cuda": torch.version.cuda, "python": platform.python_version()}
    text = json.dumps({"what": name, "machine": machine, "commit": commit, "rows": rows}, indent=1)
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(text + "\n")
    if shown:
        print(text, flush=True)
