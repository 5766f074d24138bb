"""The weights of a model, or of one stage of it."""
from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import json
import math
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.config.base import machine
from penstock.config.base.errors import ConfigError
from penstock.config.settings.refuse_model import ModelFacts, check_model
from penstock.config.settings.tree import Config
from penstock.exec.load.backends import backends_of, kept_packed, packer
from penstock.exec.load.sizing import KvLayout, kv_format, kv_layout, show_size, why_not_fp8
from penstock.exec.step.links import nodes_of, of_config
from penstock.kernels import registry
from penstock.kernels.fused import layer
from penstock.kernels.gemm import experts
from penstock.kernels.state import scan
from penstock.kernels.types.packed import Packed
from penstock.model import registry as families
from penstock.model.base import Checkpoint, Model, Stage, TpGroup
from penstock.model.eagle3 import Eagle3, read_eagle
from penstock.model.parts import ONE
from penstock.model.source.overrides import Noted
from penstock.model.weights.checkpoint import open_checkpoint
from penstock.model.weights.formats.gguf import PACKED
from penstock.model.weights.formats.table import method_of, reader_of
from penstock.model.weights.locate import ModelFiles, files_of, locate
from penstock.model.weights.slots import LinearFactory

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_MAY_STAY = " (--dtype gguf keeps blocks packed, scales rounded to f16)"
_WORDS = {"e4m3": "fp8", "e2m1": "fp4", "u8": "int{}"}
TRIM_BYTES = 64 << 20         # weights loaded between two trims of the heap
PROGRESS_S = 10.0             # between two lines of the log that say how far it is
TURN_S = 0.0005               # for which a thread keeps the interpreter while weights are read


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights, and what is worth telling about them; `dtype` of weights and KV, `bytes` in
    it, `peak` what loading added to the largest resident size of this process; `whole`: the shape of all
    its stages, without weights; `digest`: of its configuration; `layout`: of all its stages; `packed`: types in
    which some weights stay."""

    model: Model
    backends: dict[str, registry.Choice]
    name: str
    load_format: str
    dtype: torch.dtype
    bytes: int
    peak: int
    whole: Model
    digest: str
    layout: KvLayout
    packed: tuple[str, ...] = ()


def outline(config: Config, log: Callable[[str], object]) -> LoadedModel:
    """The whole model without weights, for who plans for it and computes nothing. Raises ConfigError."""
    files = files_of(config.model)
    checkpoint, pack, backends = _opened(config, files, log)
    dtype = dtype_of(config, files, checkpoint.config)
    parts = of_config(config, families.read_spec_of(checkpoint.config).num_layers)
    mine = nodes_of(config)[config.nodes.rank]
    _check_weights_fit(config, files, checkpoint, dtype, [parts[i] for i in mine])
    model = _whole(config, checkpoint, dtype, pack, _eagle(config, checkpoint, dtype, pack, backends))
    return LoadedModel(model, backends, files.name, files.load_format, dtype, 0, 0, model,
                  digest_of(checkpoint.config), kv_layout(config, model, dtype))


def dtype_of(config: Config, files: ModelFiles, checkpoint: Mapping[str, object]) -> torch.dtype:
    """--dtype, or for `auto` the checkpoint's own where that is computed in, else bfloat16: of a GGUF, whose
    blocks have none, too."""
    asked = config.model.dtype
    if asked == "gguf":
        return torch.float32 if config.device.device == "cpu" else torch.bfloat16
    own = "" if files.gguf is not None else str(
        checkpoint.get("dtype") or checkpoint.get("torch_dtype") or "").removeprefix("torch.")
    return DTYPES[asked] if asked != "auto" else DTYPES.get(own, torch.bfloat16)


def _kv_asked(config: Config, model: Model) -> list[str]:
    """A line for the log, where the checkpoint asks for a KV cache of its own."""
    asked, kept = model.kv_format, kv_format(model, config.kv)
    if not asked:
        return []
    if asked == kept:
        return ["its KV cache is fp8, as the checkpoint asks; each vector has a scale of its own, in place of the "
                "checkpoint's static ones"]
    why = why_not_fp8(model, config.kv) if (asked, kept) == ("fp8_e4m3", "auto") else ""
    return [f"the checkpoint asks for a KV cache in {asked}, and gets one in "
            f"{'the compute type' if kept == 'auto' else kept}{', ' * bool(why)}{why}"]


def facts_of(files: ModelFiles) -> ModelFacts:
    """What refusals ask of a model. Raises ConfigError: no model of a family that is known."""
    noted = Noted(files.config)
    spec = families.read_spec_of(noted)
    reader = None if files.gguf is not None else reader_of(files.config, str(files.folder))
    noted.check(files.overrides, files.own_config, files.name, inside=files.wrapper is not None)
    return ModelFacts(name=files.name, load_format=files.load_format, layers=spec.num_layers,
                      quantised=method_of(files.config) if files.gguf is None else "gguf",
                      integers=reader is not None and reader.kind == "u8", context=spec.rope.max_position,
                      kv_heads="paged_attention" in spec.attention.ops, **families.numbers_of(spec))


def weight_bytes(checkpoint: Checkpoint, dtype: torch.dtype, stage: Stage | None = None) -> int:
    """Of the weights of a stage, or of all, as they are kept; a little more where fused ones are codes of
    several types, or the embedding is the head as well."""
    return sum(math.prod(shape) * dtype.itemsize if (form := checkpoint.format(name)) is None else form.num_bytes(shape)
               for name, shape in families.tensor_shapes(checkpoint.config, stage))


def _opened(config: Config, files: ModelFiles, log: Callable[[str], object]) \
        -> tuple[Checkpoint, LinearFactory, dict[str, registry.Choice]]:
    """Its headers, what packs its weights, and the back-ends. Raises ConfigError."""
    check_model(config, facts_of(files))
    keeps = kept_packed(config, files, log)
    checkpoint = open_checkpoint(files, keeps)
    backends = backends_of(config, checkpoint.config, log)
    return checkpoint, packer(backends), backends


@dataclass(frozen=True, slots=True)
class Sketch:
    """A model that is going to be loaded: its shape, and what it is built of, before its weights are read."""

    checkpoint: Checkpoint
    dtype: torch.dtype
    backends: dict[str, registry.Choice]
    made: Callable[..., Model]          # of a stage

    @property
    def config(self) -> dict[str, Any]:
        return self.checkpoint.config

    def bytes(self, stage: Stage | None) -> int:
        return weight_bytes(self.checkpoint, self.dtype, stage)

    def build(self, stage: Stage, device: str) -> Model:
        """Of some layers, with random weights."""
        model = self.made(stage=stage)
        for name, tensor in families.dummy_tensors(self.config, 0, model.wants, device=device,
                                                   formats=self.checkpoint.format):
            model.load(name, tensor)
        model.finish()
        return model


@contextlib.contextmanager
def _short_turns() -> Iterator[None]:
    """Who reads a part of a weight asks for the interpreter a few times, and another thread that imports or
    compiles gives it up once in 5 ms: with that 16 GB took 6 to 9 s, of which 5 were waiting for turns."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(TURN_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@_short_turns()
def load(config: Config, stage: Stage | None, log: Callable[[str], object], tp_group: TpGroup | None = None,
         beside: Callable[[Sketch], object] | None = None) -> LoadedModel:
    """Stream the weights of a stage in, or all: one source tensor at a time, and freed ones go back to
    the system. `log` is told how far it is every PROGRESS_S, as long as tensors come. beside: begins what
    goes on while they are read. Raises ConfigError."""
    started, rss_before, device = time.perf_counter(), _peak_rss(), config.device.device
    files = files_of(config.model)
    name, load_format = files.name, files.load_format
    checkpoint, pack, backends = _opened(config, files, log)
    dtype = dtype_of(config, files, checkpoint.config)
    together = experts.OP.use(backends["experts"].name) if "experts" in backends else None
    drafts, all_of_it = config.schedule.speculative_method == "mtp", stage is None
    if drafts and stage is None:
        stage = families.drafting_stage(checkpoint.config)
    made = functools.partial(
        families.build, checkpoint.config, dtype=dtype, linear=pack, ops=layer.OP.use(backends["layer"].name),
        experts=together, scan=scan.OP.use(backends["scan"].name if "scan" in backends else "reference"))
    model = made(stage=stage, tp_group=tp_group)
    eagle = _eagle(config, checkpoint, dtype, pack, backends, stage, tp_group)
    whole = model if all_of_it else _whole(config, checkpoint, dtype, pack, eagle)
    digest = digest_of(checkpoint.config)
    need = weight_bytes(checkpoint, dtype, stage)
    kv_layout(config, whole, dtype)                     # what it refuses is refused by now
    _check_weights_fit(config, files, checkpoint, dtype, [stage])
    tensors: Iterable[tuple[str, Tensor | Packed]] = (
        families.dummy_tensors(checkpoint.config, config.model.seed or 0, model.wants, device=device,
                               formats=checkpoint.format, drafts=drafts)
        if load_format == "dummy" else checkpoint.tensors(model.wants, device))
    first = stage is None or (stage.embeds and stage.tp_rank.index == 0)     # of several ranks one says so
    become = first and checkpoint.dequantised
    log(f"model: {name} has {show_size(need)} of weights to load" +
        f"; {become} become {show_dtype(dtype)}" * bool(become))
    if first:
        for line in (*_kv_asked(config, whole), *checkpoint.unread(whole.ignores)):
            log(f"model: {line}")
    if beside is not None:
        beside(Sketch(checkpoint, dtype, backends, made))
    loaded, trimmed, told, packed = 0, 0, time.perf_counter(), packed_as(checkpoint)
    for tensor_name, tensor in tensors:
        loaded += tensor.num_bytes if isinstance(tensor, Packed) else tensor.numel() * dtype.itemsize
        model.load(tensor_name, tensor)
        del tensor                        # or it would live while the next one is read
        if device == "cpu" and loaded - trimmed > TRIM_BYTES:
            trimmed = loaded
            _trim_heap()
        if (now := time.perf_counter()) - told >= PROGRESS_S:
            told = now
            log(f"model: {show_size(loaded)} of {show_size(need)} after {now - started:.0f} s")
    kept = kept_as(config, dtype, packed) + _other_form(config, files)
    # A GGUF's header holds its whole tokenizer; `finish` may pack a large head: not both at once.
    del tensors, checkpoint, files
    _trim_heap()
    model.finish()
    loaded = model.num_bytes
    if eagle is not None and model.stage.heads:
        _fill(eagle, config)
        model.take_drafts(eagle)
        loaded += eagle.num_bytes
    elif eagle is not None:
        model.tap(eagle.taps)
    if model.dequantised:
        log(f"model: {model.dequantised} weights are dequantised: a TP rank's part begins at no multiple of 16 columns")
    log(f"model: {name}, {show_size(loaded)} of weights as {kept} in {time.perf_counter() - started:.1f} s")
    return LoadedModel(model, backends, name, load_format, dtype, loaded, _peak_rss() - rss_before, whole, digest,
                       kv_layout(config, whole, dtype), packed)     # with what drafts by now


def _whole(config: Config, checkpoint: Checkpoint, dtype: torch.dtype, pack: LinearFactory,
           eagle: Eagle3 | None) -> Model:
    """The shape of all stages, with what drafts."""
    drafts = config.schedule.speculative_method == "mtp"
    whole = families.build(checkpoint.config, dtype=dtype, linear=pack,
                           stage=families.drafting_stage(checkpoint.config) if drafts else None)
    if eagle is not None:
        whole.take_drafts(eagle)
    return whole


def _eagle(config: Config, checkpoint: Checkpoint, dtype: torch.dtype, pack: LinearFactory,
           backends: Mapping[str, registry.Choice], stage: Stage | None = None,
           tp_group: TpGroup | None = None) -> Eagle3 | None:
    """What a folder has to draft for the model, without weights. Raises ConfigError: it is for another."""
    folder = config.schedule.speculative_model
    if folder is None:
        return None
    spec = families.read_spec_of(checkpoint.config)
    return Eagle3(read_eagle(locate(folder).config, spec, folder), dtype, pack,
                  layer.OP.use(backends["layer"].name), ONE if stage is None else stage.tp_rank, tp_group)


def _fill(eagle: Eagle3, config: Config) -> None:
    """With its weights. Raises ConfigError."""
    files = locate(config.schedule.speculative_model or "")
    for name, tensor in open_checkpoint(files).tensors(eagle.wants, config.device.device):
        eagle.load(name, tensor)
    eagle.finish()


def digest_of(config: Mapping[str, object]) -> str:
    """The same for the same model configuration, in any process."""
    text = json.dumps(config, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def identity_of(loaded: LoadedModel) -> dict[str, str]:
    """What all ranks of an engine must have in common."""
    caches = loaded.layout.caches
    layouts = (f"{g.name} {'x'.join(map(str, layout.shape))}"
               for g, layout in zip(caches.groups, caches.layouts, strict=True))
    return {"configuration": loaded.digest, "dtype": show_dtype(loaded.dtype),
            "layout": ", ".join(layouts),
            "back-ends": ", ".join(f"{op}={c.name}" for op, c in loaded.backends.items())}


def packed_as(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the types in which some weights of the whole model stay, in words."""
    forms = (checkpoint.format(name) for name, _ in families.tensor_shapes(checkpoint.config))
    return tuple(sorted({_WORDS[form.kind].format(form.bits) for form in forms if form is not None}))


def kept_as(config: Config, dtype: torch.dtype, packed: Sequence[str]) -> str:
    """What weights are in memory, in words; packed: as `packed_as` has it."""
    return "codes" if config.model.dtype == "gguf" else " and ".join((*packed, show_dtype(dtype)))


def _check_weights_fit(config: Config, files: ModelFiles, checkpoint: Checkpoint, dtype: torch.dtype,
                       parts: Sequence[Stage | None]) -> None:
    """Of the ranks here. They, and, but for codes of a GGUF, the largest once more, in four bytes an element at least:
    as it came, and its rows until they are packed. Raises ConfigError."""
    need = sum(weight_bytes(checkpoint, dtype, part) for part in parts)
    shapes = dict(pair for part in parts for pair in families.tensor_shapes(checkpoint.config, part))
    kinds = {form.kind for name in shapes if (form := checkpoint.format(name))}
    more = 0 if "u8" in kinds and files.gguf is not None else 4 * max(map(math.prod, shapes.values()))
    cuda = config.device.device == "cuda"
    gpus = range(min(len(parts), torch.cuda.device_count()))        # that this process sees
    here = machine.probe()
    free = sum(int(torch.cuda.mem_get_info(i)[0]) for i in gpus) if cuda else here.memory_available
    if need + more > free:
        where = "of the GPU's memory" if cuda else "of memory"
        kept = kept_as(config, dtype, packed_as(checkpoint))
        less = " or --dtype bfloat16" if kept == "float32" else ""
        raise ConfigError(f"{files.name}: its weights take {show_size(need)} as {kept} and "
                          f"{show_size(more)} more while they are loaded, and {show_size(free)} {where} "
                          f"are free: take a smaller model{less}{'' if cuda else here.limit}")


def _other_form(config: Config, files: ModelFiles) -> str:
    """Which weights of a GGUF are floats where others stay codes, or that they could stay codes."""
    if files.load_format == "safetensors" and config.model.dtype != "gguf" and config.device.device == "cpu":
        reader = reader_of(files.config, str(files.folder))
        return _MAY_STAY if reader is not None and reader.kind == "u8" else ""
    if files.load_format != "gguf" or config.device.device != "cpu":
        return ""
    tensors = files.gguf_header.tensors.values()
    if config.model.dtype == "gguf":
        floats = dict.fromkeys(t.block for t in tensors
                               if t.block not in (*PACKED, "F32") and len(t.shape) > 1)
        return f" (those of {', '.join(floats)}, and what is fused with them, as float32)" if floats else ""
    can = any(t.block in PACKED for t in tensors)
    return _MAY_STAY if can else ""


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
