"""Which implementations compute with a model here, and what a rank gets of them."""
from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.config.base import machine
from penstock.config.base.errors import ConfigError
from penstock.config.base.paths import cache_dir
from penstock.config.request.selection import BOUNDS, Selection, indexer_selection, selection_of
from penstock.config.settings.tree import Config
from penstock.exec.step.attend import LatentOps
from penstock.exec.worker import WorkerParts
from penstock.kernels import registry
from penstock.kernels.attention import latent_attention, paged_attention
from penstock.kernels.c.build import announced
from penstock.kernels.gemm import linear
from penstock.kernels.op import Unusable
from penstock.kernels.platform import KernelError, Platform, limit, probe
from penstock.kernels.types.packed import KINDS
from penstock.kernels.types.states import BLOCK
from penstock.model import registry as families
from penstock.model.base import CacheShape, Model, Selector
from penstock.model.weights.formats.gguf import PACKED
from penstock.model.weights.formats.table import reader_of
from penstock.model.weights.locate import ModelFiles
from penstock.model.weights.slots import LinearFactory

GPU_KINDS = KINDS               # that stay packed on a GPU, but for one that converts no e4m3


def backends_of(config: Config, model: dict[str, Any], log: Callable[[str], object]) -> dict[str, registry.Choice]:
    """For a model of this configuration. Raises ConfigError."""
    spec = families.read_spec_of(model)
    on_device = config.device.device == "cuda"
    ops = (*spec.ops, *(("experts",) if spec.moe is not None and on_device else ()), *(("draw",) if on_device else ()),
           *(("mask",) if config.model.grammar_backend != "none" else ()),
           *(("paged_attention",) if config.schedule.speculative_method == "eagle3" else ()))
    score = spec.selector.score if spec.selector else BOUNDS if selection_of(config.kv) else ""
    more = registry.SELECTING[score] if score else ()
    return choose_backends(config, ("linear", "layer", *ops, *more), log)


def block_of(backends: Mapping[str, registry.Choice]) -> int:
    """Tokens that layers with a state compute together of prompts (`kernels.types.states.Blocks`); 1: none do."""
    return BLOCK if "scan" in backends and backends["scan"].name == "blocks" else 1


def choose_backends(config: Config, ops: Sequence[str],
                    log: Callable[[str], object]) -> dict[str, registry.Choice]:
    machine.bound_onednn_caches()
    machine.keep_compiled(cache_dir() / "kernels" / "flash-attn-4")
    requested = dict(pair.split("=", 1) for pair in config.device.backends)
    try:
        with announced(log):
            choices = registry.choose(_platform(config), requested, ops)
    except KernelError as e:
        given = f"--backends {','.join(config.device.backends)}" if requested else (
            f"--device {config.device.device}")
        raise ConfigError(f"{given}: {e}") from None
    log(f"back-ends: {', '.join(f'{op} {choice.name}' for op, choice in choices.items())}; "
        "penstock doctor explains why")
    return choices


def _platform(config: Config) -> Platform:
    limit(config.device.debug_cpu_isa)
    return probe(config.device.device, cache_dir() / "kernels")


def _check_packable(config: Config, files: ModelFiles) -> None:
    """Raises ConfigError: a GGUF without weights that can stay codes, or nothing here multiplies them."""
    there = {tensor.block for tensor in files.gguf_header.tensors.values()} if files.gguf is not None else PACKED
    if not there & PACKED:
        raise ConfigError(f"--dtype gguf: {files.name} has no weights of {', '.join(sorted(PACKED))}, only "
                          f"of {', '.join(sorted(there))}: leave the flag out")
    try:
        if config.device.device == "cpu":
            linear.OP.get("c").usable_on(_platform(config))
    except Unusable as why:
        raise ConfigError(f"--dtype gguf: {why}: use --dtype float32") from None


def kept_packed(config: Config, files: ModelFiles, log: Callable[[str], object]) -> tuple[str, ...]:
    """Which kinds of weights stay packed: on a CPU, and of a GGUF, where that was asked for; else those that a GPU has
    kernels for. Raises ConfigError, also where --dtype gguf is asked for and nothing multiplies codes."""
    if config.model.dtype == "gguf":
        _check_packable(config, files)
    if config.device.device == "cpu":
        return ("u8",) if config.model.dtype == "gguf" else ()
    if config.model.dtype != "gguf" and (files.gguf is not None or reader_of(
            files.config, f"{files.folder}/config.json") is None):
        return ()
    try:
        platform = _platform(config)
        linear.OP.get("triton").usable_on(platform)
    except Unusable as why:
        if config.model.dtype == "gguf":
            raise ConfigError(f"--dtype gguf: {why}: use --dtype bfloat16") from None
        log(f"quantised weights are dequantised when they are loaded: {why}")
        return ()
    except KernelError:                 # no such device: whoever chooses back-ends says so
        return ()
    return linear.kinds(platform, "triton")


def packer(backends: Mapping[str, registry.Choice]) -> LinearFactory:
    """What makes products of weights."""
    return functools.partial(linear.pack, backend=backends["linear"].name)


def _attention_of(backends: Mapping[str, registry.Choice]) -> paged_attention.Prepare | LatentOps:
    """What a rank attends with, of the ops that the model's family needs."""
    heads = (functools.partial(paged_attention.prepare, backend=backends["paged_attention"].name)
             if "paged_attention" in backends else None)
    if "latent_attention" in backends:
        return LatentOps(latent_attention.OP.use(backends["latent_attention"].name), heads)
    assert heads is not None, "a model that attends"
    return heads


def selection_for(config: Config, model: Model) -> Selection | None:
    """What requests select; None: they read all. A model that chooses its tokens itself takes no other
    choice."""
    own = model.selector
    return indexer_selection(own.tokens, own.block) if own else selection_of(config.kv)


def selector_for(selection: Selection | None, model: Model) -> Selector | None:
    """How layers select: the model's own selector, or bounds of keys by what requests may ask for; None: they read
    all of their KV."""
    if selection is None or selection.native:
        return None if selection is None else model.selector
    return Selector(group=BOUNDS, score=BOUNDS, block=selection.unit, top_k=selection.budget // selection.unit,
                    per_head=True, first=selection.sinks, last=selection.window, native=False)


def parts_of(model: Model, backends: Mapping[str, registry.Choice], selection: Selection | None,
             hot_pages: int, groups: Sequence[CacheShape] | None = None) -> WorkerParts:
    """What a rank computes with, of the back-ends that were chosen; groups as there."""
    return WorkerParts(model, _attention_of(backends), groups, selector_for(selection, model), hot_pages,
                       {op: choice.name for op, choice in backends.items()},
                       **{op: backends[op].name for op in ("draw", "mask") if op in backends})
