"""`penstock doctor`: this machine, the back-end of each op and why, the demo model, the refusals.

Reads and prints; downloads nothing and loads no weights. Exit code 1 when serving cannot work.
"""
from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from penstock.config.base.errors import ConfigError
from penstock.config.base.machine import Machine, probe
from penstock.config.base.paths import cache_dir, hub_cache_dir
from penstock.config.settings.refuse import REFUSED
from penstock.config.settings.tree import Config
from penstock.config.settings.unbuilt import UNBUILT


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. Not `ok`: serving cannot work until it is put right."""

    section: str
    name: str
    text: str
    ok: bool = True


def run(config: Config | None, args: argparse.Namespace) -> int:
    """Prints the report. `config` is None when no MODEL was named."""
    findings = list(examine(config, probe()))
    width = max(len(f.name) for f in findings) + 2
    section = ""
    for f in findings:
        if f.section != section:
            print(("\n" if section else "") + f.section)
            section = f.section
        print(f"  {f.name:{width}}{'' if f.ok else 'PROBLEM: '}{f.text}")
    problems = sum(not f.ok for f in findings)
    print(f"\n{problems} problem{'s' * (problems != 1)}" if problems else "\nno problem found")
    return 1 if problems else 0


def examine(config: Config | None, machine: Machine) -> Iterator[Finding]:
    """Everything that the report says, in order."""
    if config is not None and config.device.device == "auto":
        chosen: Literal["cuda", "cpu"] = "cuda" if machine.device == "cuda" else "cpu"
        config = replace(config, device=replace(config.device, device=chosen))
    yield from _machine(machine)
    yield from _backends(config, config.device.device if config else machine.device)
    yield from _model(config)
    yield from _ranks(config)
    yield Finding("config", "checks", f"{len(REFUSED)} rules for values and combinations of flags; {len(UNBUILT)} "
                  "flags of other engines are refused by name (docs/reference/flags.md lists them)")


def _machine(machine: Machine) -> Iterator[Finding]:
    import torch

    yield Finding("platform", "system", f"{machine.system}, {machine.machine}")
    yield Finding("platform", "cpu", f"{machine.cpu}, cores to use: {machine.cores}")
    yield Finding("platform", "features", " ".join(machine.features) or "none that matter here")
    yield Finding("platform", "memory", f"{_gib(machine.memory_total)}, "
                  f"{_gib(machine.memory_available)} free", ok=machine.memory_available > 1 << 29)
    yield Finding("platform", "python", machine.python)
    build = "CPU build" if torch.version.cuda is None else f"CUDA {torch.version.cuda}"
    yield Finding("platform", "torch", f"{torch.__version__} ({build})")
    yield Finding("platform", "gpu", f"{', '.join(machine.gpus) or 'none'}: {machine.why}")
    yield Finding("platform", "device", f"--device auto is {machine.device} here")


def _backends(config: Config | None, device: str) -> Iterator[Finding]:
    from penstock.kernels.c.build import announced, compiler, triton_runs
    from penstock.kernels.op import Unusable
    from penstock.kernels.platform import KernelError, limit
    from penstock.kernels.platform import probe as probe_torch
    from penstock.kernels.registry import choose

    named = dict(b.split("=") for b in config.device.backends) if config else {}
    limit(config.device.debug_cpu_isa if config else "native")
    try:
        with announced(_to_stderr, after_s=0):
            choices = choose(probe_torch(device, cache_dir() / "kernels"), named)
        if device == "cuda":
            triton_runs()
    except (KernelError, Unusable) as e:
        yield Finding("back-ends", "--backends" if named else "--device", str(e), ok=False)
        return
    for op, choice in choices.items():
        skipped = [f"{name} skipped: {why}" for name, why in choice.skipped
                   if not why.endswith(f", not on {device}")]
        usable = [f"{name} usable" for name in choice.usable]
        yield Finding("back-ends", op,
                      "; ".join([f"{choice.name} ({choice.reason})", *skipped, *usable]))
    broken = {why: op for op, choice in choices.items() for name, why in choice.skipped
              if name == "c" and device == "cpu"}
    for why, op in broken.items():
        if compiler() is not None:              # without one that is how it is
            yield Finding("back-ends", "c", f"{op} does without its kernel in C, which is faster: {why}",
                          ok=False)


def _model(config: Config | None) -> Iterator[Finding]:
    from penstock.config.settings.refuse_model import check_model
    from penstock.exec.load.backends import kept_packed
    from penstock.exec.load.weights import facts_of
    from penstock.model.source.demo import DEMO_NAME
    from penstock.model.weights.formats.gguf import PACKED
    from penstock.model.weights.locate import files_of

    there = _demo_is_here()
    yield Finding("model", "cache", str(cache_dir()))
    yield Finding("model", "hub cache", f"{hub_cache_dir()}"
                  f"{'' if hub_cache_dir().is_dir() else ' (does not exist)'}")
    yield Finding("model", "demo", f"{DEMO_NAME}, "
                  + ("fetched" if there else "not fetched yet: the first `penstock serve demo` does"))
    if config is None or (config.model.model == "demo" and not there):
        return
    try:
        files = files_of(config.model)
        if config.model.model != "demo":
            kind = ", ".join(map(str, files.config.get("architectures") or ["unknown architecture"]))
            yield Finding("model", files.name, f"{files.load_format}, {kind}, {files.folder}")
        if files.load_format == "gguf":
            blocks = dict.fromkeys(t.block for t in files.gguf_header.tensors.values())
            packed = ", ".join(b for b in blocks if b in PACKED) or "none of them"
            yield Finding("model", "weights", f"{', '.join(blocks)}: float32 with --dtype auto on a CPU, "
                          f"which is exact; --dtype gguf keeps {packed} packed, scales rounded to f16")
        check_model(config, facts_of(files))
        kept_packed(config, files, lambda line: None)
    except ConfigError as e:
        yield Finding("model", config.model.model, str(e), ok=False)


def _demo_is_here() -> bool:
    from penstock.model.source.demo import MEMBER, NUM_BYTES

    demo = cache_dir() / "demo" / Path(MEMBER).name
    return demo.is_file() and demo.stat().st_size == NUM_BYTES


def _ranks(config: Config | None) -> Iterator[Finding]:
    """What each rank would have, if there are several; of a model that is here."""
    from penstock.config.settings.refuse_model import check_model
    from penstock.exec.load.backends import kept_packed
    from penstock.exec.load.sizing import kv_layout
    from penstock.exec.load.weights import dtype_of, facts_of, weight_bytes
    from penstock.exec.step.links import of_config
    from penstock.model.registry import build
    from penstock.model.weights.checkpoint import open_checkpoint
    from penstock.model.weights.locate import files_of

    if config is None or config.device.num_ranks == 1 or (
            config.model.model == "demo" and not _demo_is_here()):
        return
    try:
        files = files_of(config.model)
        check_model(config, facts_of(files))
        checkpoint = open_checkpoint(files, kept_packed(config, files, lambda line: None))
        if config.model.dtype == "auto":        # ranks of several run on a CPU
            config = replace(config, model=replace(config.model, dtype="float32"))
        dtype = dtype_of(config, files, checkpoint.config)
        whole = build(checkpoint.config, dtype=dtype, linear=lambda w_OI, b_O: lambda x_TI: x_TI)
        stages = of_config(config, whole.stage.end)
        layout = kv_layout(config, whole, dtype)
    except ConfigError as e:
        yield Finding("ranks", "--pp", str(e), ok=False)
        return
    for i, stage in enumerate(stages):
        size = weight_bytes(checkpoint, dtype, stage)
        kv = layout.caches.stage(stage, layout.groups).page_bytes // layout.caches.page_size
        yield Finding("ranks", f"rank {i}", f"layers {stage.first} to {stage.end - 1}, "
                      f"{size / (1 << 20):.1f} MiB of weights, {kv} bytes of KV a token")


def _to_stderr(line: str) -> None:
    print(f"penstock: {line}", file=sys.stderr, flush=True)


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"
