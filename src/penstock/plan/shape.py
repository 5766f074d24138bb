"""A model as numbers: what an engine of it would have for pools, and what a step computes and reads.

The pools come from the code that sizes an engine, with the memory of a machine that need not be this one. Of the
model only its config is read.
"""
from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import NoReturn

from penstock.config.base.errors import ConfigError
from penstock.config.base.machine import Machine, probe
from penstock.config.settings.refuse_model import check_model
from penstock.config.settings.resolve import resolve
from penstock.config.settings.tree import Config
from penstock.core.settings import CacheGroup, CoreConfig
from penstock.exec.load.backends import GPU_KINDS
from penstock.exec.load.sizing import DeviceMemory, kv_layout, size_pools
from penstock.exec.load.weights import dtype_of, facts_of, weight_bytes
from penstock.model import registry as families
from penstock.model.base import Model
from penstock.model.latent import LatentSpec
from penstock.model.spec import Spec
from penstock.model.weights.checkpoint import open_checkpoint
from penstock.model.weights.locate import ModelFiles, files_of
from penstock.plan.rates import Rates

STEP_TOKENS = 8_192             # of an engine on a GPU, unless --max-num-batched-tokens says otherwise
ENDLESS = 1 << 50               # bytes of a machine that does not exist yet


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a step of a model reads and computes.

    dense_bytes     weights that every step reads; expert_bytes: of all experts, of which a token visits
                    `visited` (a share)
    token_flops     products of one prompt token, without the head
    attention       of each kind of layers: FLOP for a token that is attended to, and how many are at most (0: all)
    """

    dense_bytes: float
    expert_bytes: float
    visited: float
    token_flops: float
    attention: tuple[tuple[float, int], ...]

    def weights_read(self, tokens: int) -> float:
        """Bytes of the weights that a step of so many tokens reads, with tokens that choose experts evenly."""
        return self.dense_bytes + self.expert_bytes * (1 - (1 - self.visited) ** tokens)

    def prompt_flops(self, start: float, count: float) -> float:
        """Return what `count` prompt tokens after the first `start` take."""
        context = start + (count + 1) / 2
        return count * (self.token_flops + sum(
            flops * (min(context, reach) if reach else context) for flops, reach in self.attention))


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """An engine that is not there: the planner's settings, the model's numbers, and the bytes of its pools.

    context     tokens of the model's context, or --max-model-len; `core.max_len` is less where the pools hold less
    """

    core: CoreConfig
    shape: Shape
    vocab: int
    context: int
    weight_bytes: int
    device_bytes: int
    host_bytes: int


def plan_engine(config: Config, rates: Rates) -> Planned:
    """Size an engine. config: not resolved. Raises ConfigError, as an engine would, or for what is not modelled."""
    config = _resolved(config, rates)
    files = files_of(config.model)
    check_model(config, facts_of(files))
    checkpoint = open_checkpoint(files, GPU_KINDS if files.gguf is None and rates.device == "cuda" else ())
    dtype = dtype_of(config, files, checkpoint.config)
    model = families.build(checkpoint.config, dtype=dtype, linear=_no_weights)
    weights, layout = weight_bytes(checkpoint, dtype), kv_layout(config, model, dtype)
    selection, caches = layout.selection, layout.caches
    gpu = None
    if rates.device == "cuda":
        total = int(rates.memory_bytes)
        gpu = DeviceMemory(total=total, free=total - weights, workspace=int(rates.workspace_bytes))
    elif config.kv.kv_cache_memory_bytes is None:
        raise ConfigError("penstock plan needs --kv-cache-memory-bytes for an engine on a CPU: the machine is not here")
    core = size_pools(config, caches, model.max_position, ENDLESS, selection=selection,
                      gpu=gpu).core
    return Planned(core=core, shape=_shape(files, model, weights, dtype.itemsize), vocab=model.vocab_size,
                   context=config.model.max_model_len or model.max_position, weight_bytes=weights,
                   device_bytes=caches.nbytes(core.hbm_pages),
                   host_bytes=caches.host_bytes(core))


def _no_weights(weight: object, bias: object) -> NoReturn:
    raise AssertionError("a plan loads no weights")


def _resolved(config: Config, rates: Rates) -> Config:
    """With what an engine on that machine would have. Raises ConfigError."""
    for given, flag in ((config.device.tp > 1 or config.device.pp > 1, "--tensor-parallel-size and "
                         "--pipeline-parallel-size above 1"),
                        (config.schedule.speculative_method is not None, "--speculative-algorithm"),
                        (config.pair.disaggregation_mode is not None, "--disaggregation-mode"),
                        (config.kv.kv_storage is not None, "--kv-storage (name its size: --grid storage=SIZE)"),
                        (config.device.dp > 1, "--data-parallel-size (name it: --grid engines=N)")):
        if given:
            raise ConfigError(f"penstock plan does not model {flag}: leave it out")
    model = replace(config.model, load_format="dummy")
    device, schedule = replace(config.device, device=rates.device), config.schedule
    if rates.device == "cuda" and schedule.max_num_batched_tokens is None:
        schedule = replace(schedule, max_num_batched_tokens=STEP_TOKENS)
    return resolve(replace(config, model=model, device=device, schedule=schedule), _machine(rates))


def _machine(rates: Rates) -> Machine:
    here = replace(probe(), memory_total=ENDLESS, memory_available=ENDLESS, limit="")
    return replace(here, gpus=(rates.name,), torch_cuda="13") if rates.device == "cuda" else here


def _shape(files: ModelFiles, model: Model, weights: int, itemsize: int) -> Shape:
    spec = families.read_spec_of(files.config)
    parts = {"experts": 0.0, "tables": 0.0, "embed": 0.0, "head": 0.0, "rest": 0.0}
    for name, shape in families.tensor_shapes(files.config):
        part = ("experts" if ".experts." in name else "tables" if "embed_tokens_per_layer" in name else
                "embed" if "embed_tokens" in name else "head" if name.startswith("lm_head") else "rest")
        parts[part] += math.prod(shape)
    visited = spec.moe.num_chosen / spec.moe.num_experts if spec.moe is not None else 0.0
    looked_up = parts["tables"] + parts["embed"]                    # of which a step reads few rows
    unread = (parts["tables"] if spec.tied else looked_up) * itemsize
    experts = (weights - looked_up * itemsize) * parts["experts"] / max(1.0, sum(parts.values()) - looked_up)
    return Shape(dense_bytes=weights - unread - experts, expert_bytes=experts, visited=visited,
                 token_flops=2 * (parts["rest"] + parts["experts"] * visited), attention=_attention(spec, model))


def _attention(spec: Spec, model: Model) -> tuple[tuple[float, int], ...]:
    flops, latent = Counter[int](), spec.attention
    for reads in model.reads.values():
        group = next(group for group in model.groups if reads.source.layer in group.layers and not (
            group.selector or group.snapshot or group.drafts))
        selects = reads.source.selector
        flops[group.window or (selects.tokens if selects else 0)] += (
            2 * latent.num_heads * (latent.nope_dim + latent.rope_dim + latent.value_dim)
            if isinstance(latent, LatentSpec) else 4 * reads.num_heads * group.head_dim)
    return tuple((float(n), reach) for reach, n in flops.items())


def divided(core: CoreConfig, scale: float) -> CoreConfig:
    """The settings for lengths that are divided by `scale`: all that counts tokens or pages, but the page size."""
    if scale == 1:
        return core
    slab = core.groups[0].slab_pages

    def pages(n: int) -> int:
        return n and max(slab, round(n / scale) // slab * slab)

    def tokens(n: int) -> int:
        return n and max(core.page_size, round(n / scale))

    return replace(core, hbm_pages=pages(core.hbm_pages), dram_pages=pages(core.dram_pages),
                   disk_pages=pages(core.disk_pages), retained_pages=round(core.retained_pages / scale),
                   hot_pages=-int(-core.hot_pages // scale),
                   hot_pages_max=-int(-core.hot_pages_max // scale), budget=tokens(core.budget),
                   wait_pages=round(core.wait_pages / scale), step_tokens=tokens(core.step_tokens),
                   max_len=tokens(core.max_len))


def kv_read(groups: tuple[CacheGroup, ...], page_size: int, context: int, budget: int) -> float:
    """Bytes of KV that a request with so many tokens reads in a decode step; budget: tokens that it selects, 0: it
    reads all."""
    total = 0.0
    for group in groups:
        if group.snapshot:
            total += group.page_bytes
            continue
        read = min(context, group.window or context)
        if budget and group.hosted:
            read = min(read, budget)
        total += group.page_bytes / page_size * read
    return total
