"""The weights of a model, or of one stage of it, and the back-ends that compute with them."""
from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import math
import resource
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.config.base import machine
from penstock.config.base.errors import ConfigError
from penstock.config.base.paths import cache_dir
from penstock.config.request.selection import Selection, indexer_selection, selection_of
from penstock.config.settings.refuse_model import ModelFacts, check_model
from penstock.config.settings.tree import Config
from penstock.exec.load.layout import Caches
from penstock.exec.load.sizing import show_size
from penstock.exec.sparse.bounds import Selector
from penstock.exec.step.attend import LatentOps
from penstock.kernels import registry
from penstock.kernels.attention import latent_attention, paged_attention
from penstock.kernels.choose import index_select
from penstock.kernels.choose.select import SelectRule
from penstock.kernels.fused import layer
from penstock.kernels.gemm import experts, linear, scaled_linear
from penstock.kernels.platform import KernelError, Platform, Unusable, limit, probe
from penstock.kernels.types.scaled import Scaled
from penstock.model import registry as families
from penstock.model.base import Checkpoint, Model, Stage
from penstock.model.weights.checkpoint import open_checkpoint
from penstock.model.weights.codes import PACKED, Codes, Packed, codes_bytes
from penstock.model.weights.fp8 import read_blocks
from penstock.model.weights.locate import ModelFiles, locate
from penstock.model.weights.slots import LinearFactory

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "gguf": torch.float32}
TRIM_BYTES = 64 << 20         # weights loaded between two trims of the heap
PROGRESS_S = 10.0             # between two lines of the log that say how far it is


def choose_backends(config: Config, ops: Sequence[str],
                    log: Callable[[str], object]) -> dict[str, registry.Choice]:
    machine.bound_onednn_caches()
    machine.keep_compiled(cache_dir() / "kernels" / "flash-attn-4")
    requested = dict(pair.split("=", 1) for pair in config.device.backends)
    try:
        choices = registry.select(_platform(config), requested, ops)
    except KernelError as e:
        given = f"--backends {','.join(config.device.backends)}" if requested else (
            f"--device {config.device.device}")
        raise ConfigError(f"{given}: {e}") from None
    for choice in choices.values():
        log(str(choice))
    return choices


def _platform(config: Config) -> Platform:
    limit(config.device.cpu_isa)
    return probe(config.device.device, cache_dir() / "kernels")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model with its weights, and what is worth telling about them; `dtype` of weights and KV, `bytes` in
    it, `peak` what loading added to the largest resident size of this process; `whole`: the shape of all
    its stages, without weights; `digest`: of its configuration; `scaled`: some weights have stayed in fp8."""

    model: Model
    backends: dict[str, registry.Choice]
    name: str
    load_format: str
    dtype: torch.dtype
    bytes: int
    peak: int
    whole: Model
    digest: str
    scaled: bool = False


def outline(config: Config, log: Callable[[str], object]) -> Loaded:
    """The whole model without weights, for who plans for it and computes nothing. Raises ConfigError."""
    files = locate(config.model.model, load_format=config.model.load_format)
    checkpoint, pack, backends = _opened(config, files, log)
    dtype = dtype_of(config, files, checkpoint.config)
    _check_weights_fit(config, files, checkpoint, dtype)
    model = families.build(checkpoint.config, dtype=dtype, linear=pack)
    return Loaded(model, backends, files.name, files.load_format, dtype, 0, 0, model,
                  digest_of(checkpoint.config))


def dtype_of(config: Config, files: ModelFiles, checkpoint: Mapping[str, object]) -> torch.dtype:
    """--dtype, or for `auto` the checkpoint's own where that is computed in, else bfloat16: of a GGUF, whose
    blocks have none, too."""
    asked = config.model.dtype
    own = "" if files.gguf is not None else str(
        checkpoint.get("dtype") or checkpoint.get("torch_dtype") or "").removeprefix("torch.")
    return DTYPES[asked] if asked != "auto" else DTYPES.get(own, torch.bfloat16)


def headers(config: Config, files: ModelFiles, *, scaled: bool = False) -> Checkpoint:
    """The checkpoint, of which no weight is read. `scaled`: those in fp8 stay that. Raises ConfigError."""
    packed = config.model.dtype == "gguf"
    if packed:
        _check_packable(files, _platform(config))
    return open_checkpoint(files, packed=packed, scaled=scaled)


def _check_packable(files: ModelFiles, platform: Platform) -> None:
    """Raises ConfigError: not of a GGUF with weights that can stay codes, or nothing here multiplies them."""
    if files.load_format != "gguf":
        return                          # `check_model` refuses that
    there = {tensor.block for tensor in files.gguf_header.tensors.values()}
    if not there & PACKED:
        raise ConfigError(f"--dtype gguf: {files.name} has no weights of {', '.join(sorted(PACKED))}, only "
                          f"of {', '.join(sorted(there))}: leave the flag out")
    try:
        linear.OP.get("native").usable_on(platform)
    except Unusable as why:
        raise ConfigError(f"--dtype gguf: {why}: use --dtype float32") from None


def facts_of(files: ModelFiles) -> ModelFacts:
    """What refusals ask of a model. Raises ConfigError: no model of a family that is known."""
    spec = families.read_spec_of(files.config)
    return ModelFacts(name=files.name, load_format=files.load_format, layers=spec.num_layers,
                      topk=spec.attention.shape.topk, kv_heads="paged_attention" in spec.attention.ops)


def weight_bytes(checkpoint: Checkpoint, dtype: torch.dtype, stage: Stage | None = None) -> int:
    """Of the weights of a stage, or of all, as they are kept; a little more where fused ones are codes of
    several types, or the embedding is the head as well."""
    return sum(_bytes_of(checkpoint, name, shape, dtype)
               for name, shape in families.tensor_shapes(checkpoint.config, stage))


def _bytes_of(checkpoint: Checkpoint, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    if name in checkpoint.codes:
        return codes_bytes(checkpoint.codes[name], shape)
    blocks = checkpoint.scaled(name)
    if blocks is not None:
        return math.prod(shape) + 4 * math.prod(blocks.scales(shape))
    return math.prod(shape) * dtype.itemsize


def _opened(config: Config, files: ModelFiles, log: Callable[[str], object]) \
        -> tuple[Checkpoint, LinearFactory, dict[str, registry.Choice]]:
    """Its headers, what packs its weights, and the back-ends. Raises ConfigError."""
    check_model(config, facts_of(files))
    scaled = _keeps_scaled(config, files, log)
    checkpoint = headers(config, files, scaled=scaled)
    backends = _backends_of(config, checkpoint, scaled, log)
    name = backends["linear"].name

    def pack(weight: Tensor | Packed, bias_O: Tensor | None) -> Callable[[Tensor], Tensor]:
        if isinstance(weight, Codes):
            return linear.pack_codes(weight.code_OI, weight.scale_OGB, bias_O)
        if isinstance(weight, Scaled):
            return scaled_linear.pack(weight, bias_O, backend=backends["scaled_linear"].name)
        return linear.pack(weight, bias_O, backend=name)
    return checkpoint, pack, backends


def _keeps_scaled(config: Config, files: ModelFiles, log: Callable[[str], object]) -> bool:
    """Whether weights in blocks of fp8 stay that: on a device with kernels for them. Raises ConfigError."""
    blocks = None if files.gguf is not None else read_blocks(files.config, f"{files.folder}/config.json")
    if blocks is None or config.device.device != "cuda":
        return False
    try:
        scaled_linear.OP.get("triton").usable_on(_platform(config))
        if not scaled_linear.takes(blocks.cols):
            raise Unusable(f"its blocks have {blocks.cols} columns, not 16 or a multiple")
    except Unusable as why:
        log(f"weights in fp8 are dequantised when they are loaded: {why}")
        return False
    except KernelError:                 # no such device: whoever chooses back-ends says so
        return False
    return True


def _backends_of(config: Config, checkpoint: Checkpoint, scaled: bool,
                 log: Callable[[str], object]) -> dict[str, registry.Choice]:
    spec = families.read_spec_of(checkpoint.config)
    on_device = config.device.device == "cuda"
    ops = (*spec.attention.ops, *(("scaled_linear",) if scaled else ()),
           *(("experts",) if spec.moe is not None and on_device else ()), *(("draw",) if on_device else ()))
    more = (registry.HOSTING if "index_select" in ops else
            registry.SELECTING if selection_of(config.kv) else ())
    return choose_backends(config, ("linear", "layer", *ops, *more), log)


def load(config: Config, stage: Stage | None, log: Callable[[str], object]) -> Loaded:
    """Stream the weights of a stage in, or all: one source tensor at a time, and freed ones go back to
    the system. `log` is told how far it is every PROGRESS_S, as long as tensors come. Raises ConfigError."""
    started, rss_before, device = time.perf_counter(), _peak_rss(), config.device.device
    files = locate(config.model.model, load_format=config.model.load_format)
    name, load_format = files.name, files.load_format
    checkpoint, pack, backends = _opened(config, files, log)
    dtype = dtype_of(config, files, checkpoint.config)
    together = experts.OP.use(backends["experts"].name) if "experts" in backends else None
    model = families.build(checkpoint.config, dtype=dtype, linear=pack,
                           ops=layer.OP.use(backends["layer"].name), stage=stage, experts=together)
    whole = model if stage is None else families.build(checkpoint.config, dtype=dtype, linear=pack)
    digest = digest_of(checkpoint.config)
    need = weight_bytes(checkpoint, dtype, stage)
    _check_weights_fit(config, files, checkpoint, dtype, stage)
    tensors: Iterable[tuple[str, Tensor | Packed]] = (
        families.dummy_tensors(checkpoint.config, config.model.seed or 0, model.wants, device=device,
                               scaled=checkpoint.scaled)
        if load_format == "dummy" else checkpoint.tensors(model.wants, device))
    log(f"model: {name} has {show_size(need)} of weights to load")
    loaded, trimmed, scaled, told = 0, 0, False, time.perf_counter()
    for tensor_name, tensor in tensors:
        loaded += tensor.num_bytes if isinstance(tensor, Packed) else tensor.numel() * dtype.itemsize
        scaled |= isinstance(tensor, Scaled)
        model.load(tensor_name, tensor)
        del tensor                        # or it would live while the next one is read
        if loaded - trimmed > TRIM_BYTES:
            trimmed = loaded
            _trim_heap()
        if (now := time.perf_counter()) - told >= PROGRESS_S:
            told = now
            log(f"model: {show_size(loaded)} of {show_size(need)} after {now - started:.0f} s")
    kept = kept_as(config, dtype, scaled) + _other_form(config, files)
    # A GGUF's header holds its whole tokenizer; `finish` may pack a large head: not both at once.
    del tensors, checkpoint, files
    _trim_heap()
    model.finish()
    log(f"model: {name}, {show_size(loaded)} of weights as {kept} in {time.perf_counter() - started:.1f} s")
    return Loaded(model, backends, name, load_format, dtype, loaded, _peak_rss() - rss_before, whole, digest,
                  scaled)


def attention_of(backends: Mapping[str, registry.Choice]) -> paged_attention.Planner | LatentOps:
    """What a rank attends with, of the ops that the model's family needs."""
    if "latent_attention" in backends:
        return LatentOps(index_select.OP.use(backends["index_select"].name),
                         latent_attention.OP.use(backends["latent_attention"].name))
    return functools.partial(paged_attention.plan, backend=backends["paged_attention"].name)


def selection_for(config: Config, model: Model) -> Selection | None:
    """What requests select; None: they read all. A model that chooses its tokens itself takes no other
    choice."""
    topk = model.attention.topk
    return indexer_selection(topk) if topk else selection_of(config.kv)


def selector_of(selection: Selection | None, hot_pages: int,
                backends: Mapping[str, registry.Choice]) -> Selector | None:
    """How a rank selects, in the words of its kernels; None: it reads all of its KV."""
    if selection is None:
        return None
    names = {op: backends[op].name for op in (registry.HOSTING if selection.native else registry.SELECTING)}
    rule = None if selection.native else SelectRule(unit=selection.unit, sink=selection.sinks,
                                                    window=selection.window)
    return Selector(rule=rule, budget=selection.budget, hot_pages=hot_pages, backends=names)


def digest_of(config: Mapping[str, object]) -> str:
    """The same for the same model configuration, in any process."""
    text = json.dumps(config, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def identity_of(loaded: Loaded, config: Config, caches: Caches) -> dict[str, str]:
    """What all ranks of an engine must have in common."""
    layouts = (f"{g.name} {'x'.join(map(str, layout.shape))}"
               for g, layout in zip(caches.groups, caches.layouts, strict=True))
    return {"model": f"{loaded.name} ({loaded.digest})", "dtype": show_dtype(loaded.dtype),
            "layout": ", ".join(layouts),
            "back-ends": ", ".join(f"{op}={c.name}" for op, c in loaded.backends.items())}


def kept_as(config: Config, dtype: torch.dtype, scaled: bool) -> str:
    """What weights are in memory, in words; `scaled`: those that came in fp8 are."""
    return "codes" if config.model.dtype == "gguf" else f"{'fp8 and ' * scaled}{show_dtype(dtype)}"


def _check_weights_fit(config: Config, files: ModelFiles, checkpoint: Checkpoint, dtype: torch.dtype,
                       stage: Stage | None = None) -> None:
    """They, and, but for codes, the largest once more, in four bytes an element at least: as it came, and its
    rows until they are packed. Raises ConfigError."""
    need = weight_bytes(checkpoint, dtype, stage)
    shapes = dict(families.tensor_shapes(checkpoint.config, stage))
    more = 0 if checkpoint.codes else 4 * max(map(math.prod, shapes.values()))
    cuda = config.device.device == "cuda"
    free = torch.cuda.mem_get_info()[0] if cuda else machine.probe().memory_available
    if need + more > free:
        where = "of the GPU's memory" if cuda else "of memory"
        kept = kept_as(config, dtype, any(map(checkpoint.scaled, shapes)))
        less = " or --dtype bfloat16" if kept == "float32" else ""
        raise ConfigError(f"{files.name}: its weights take {show_size(need)} as {kept} and "
                          f"{show_size(more)} more while they are loaded, and {show_size(free)} {where} "
                          f"are free: take a smaller model{less}")


def _other_form(config: Config, files: ModelFiles) -> str:
    """Which weights of a GGUF are floats where others stay codes, or that they could stay codes."""
    if files.load_format != "gguf" or config.device.device != "cpu":
        return ""
    tensors = files.gguf_header.tensors.values()
    if config.model.dtype == "gguf":
        floats = dict.fromkeys(t.block for t in tensors
                               if t.block not in (*PACKED, "F32") and len(t.shape) > 1)
        return f" (those of {', '.join(floats)}, and what is fused with them, as float32)" if floats else ""
    can = any(t.block in PACKED for t in tensors)
    return " (--dtype gguf keeps blocks packed, scales rounded to f16)" if can else ""


def _trim_heap() -> None:
    """Give freed memory back where the C library can: glibc keeps freed weights of up to 32 MiB,
    42 MiB of them after loading SmolLM2 in float32."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _peak_rss() -> int:
    """Largest resident size of this process so far, bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def show_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
