"""What does not work with the model that was found: combinations of flags and of what its files say.

Asked before a weight is read, and for the table of combinations (`tools/combos.py`). Sizes, which need the memory
that is free, are refused where they are computed (`exec/load/sizing.py`).
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from penstock.config.base.errors import ConfigError
from penstock.config.settings.refuse import Refusal
from penstock.config.settings.tree import Config, KVConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a model's files say of it.

    quantised           the format of its weights in config.json, gguf, or "": they are floats
    name, load_format   of `ModelFiles`              layers    all of them, whatever the stage
    integers            quantised as integers, other than in a GGUF, that may stay packed
    context             tokens of prompt and output that its files allow, stretched by a RoPE scaling
    topk                tokens that the model itself chooses for each query, 0: it reads all; of `block` at a time
    kv_heads            its KV is keys and values of KV heads, in one cache group; else MLA KV entries
    heads               query heads
    experts, vocab      of a layer, 0: it has none; words that it knows
    width               columns of its narrowest MLP
    state_bytes         of the part of one layer's state that a key head has, of layers that have one; 0: none has
    state_parts         of a layer's state, which TP ranks may divide
    windows             layers with a sliding window
    mtp                 layers in its files that draft, of a kind that is known
    tail                layers, the last ones, of which some read the KV of others; 0: none does
    """

    name: str
    load_format: str
    layers: int
    quantised: str = ""
    integers: bool = False
    context: int = 1 << 20
    topk: int = 0
    block: int = 1
    kv_heads: bool = True
    heads: int = 64
    experts: int = 0
    vocab: int = 1 << 15
    width: int = 1 << 12
    state_bytes: int = 0
    state_parts: int = 0
    windows: int = 0
    mtp: int = 0
    tail: int = 0

    @property
    def stages(self) -> int:
        """Pipeline stages that it can be parted into."""
        return self.layers - max(0, self.tail - 1)

    @property
    def words(self) -> Mapping[str, str]:
        """What `Refusal.why` may name."""
        return {f.name: str(getattr(self, f.name)) for f in fields(self)} | {
            "last": str(self.layers - 1), "front": str(self.layers - self.tail), "stages": str(self.stages),
            "quantised": self.quantised or "floats"}


STATE_MAX = (1 << 20) - 1024    # of a frame of a pair's stream, `transfer.codec.PAYLOAD_MAX` at least
# In docs, without a model.
WORDS = {"name": "NAME", "last": "N-1", "front": "N", "quantised": "FORMAT", **dict.fromkeys(
    ("layers", "context", "topk", "block", "heads", "experts", "vocab", "width", "state_bytes", "state_parts",
     "tail", "stages"), "N")}


def _dense(config: Config) -> set[int]:
    return {int(i) for i in config.kv.sparse_dense_layers}


def _reads_all(config: Config, model: ModelFacts) -> bool:
    return not model.topk and config.kv.sparse_top_k is None


def _other_layers(config: Config, model: ModelFacts) -> bool:
    given, stages = config.device.pp_layers, config.device.pp
    return sum(map(int, given)) != model.layers if given else stages > model.layers


def _parts_tail(config: Config, model: ModelFacts) -> bool:
    given = config.device.pp_layers
    return (int(given[-1]) if given else model.layers // config.device.pp) < model.tail


_CHOOSES = "this model's indexer selects {topk} tokens, {block} at a time: leave it out"

OF_MODEL: tuple[Refusal[ModelFacts], ...] = (
    Refusal(lambda c, m: (c.model.max_model_len or 0) > m.context, ("model.max_model_len",),
            "this model's context is {context} tokens; --rope-scaling stretches it, with a JSON object that "
            "docs/guides/sparse-decode.md shows"),
    Refusal(lambda c, m: c.model.quantization not in ("auto", m.quantised), ("model.quantization",),
            "the weights of {name} are {quantised}, and weights are not quantised when they are loaded: leave the "
            "flag out, or take a checkpoint in that format"),
    Refusal(lambda c, m: c.model.dtype == "gguf" and m.load_format != "gguf" and not m.integers, ("model.dtype",),
            "{name} is neither a .gguf file nor quantised as integers: leave the flag out"),
    Refusal(lambda c, m: c.kv.sparse_top_k is not None and not m.topk and not m.kv_heads,
            ("kv.sparse_top_k",), "block selection needs keys and values per KV head in one cache group, "
            "and this model has others: leave it out"),
    Refusal(lambda c, m: bool(m.topk) and c.kv.sparse_top_k not in (None, m.topk), ("kv.sparse_top_k",),
            "this model's indexer selects {topk} tokens, as its config.json says: leave the flag out"),
    Refusal(lambda c, m: bool(m.topk) and c.kv.sparse_block_size != KVConfig().sparse_block_size,
            ("kv.sparse_block_size",),
            _CHOOSES),
    Refusal(lambda c, m: c.kv.page_tokens(m.block) % m.block != 0, ("kv.page_size",),
            "this model selects blocks of {block} tokens, and a page holds whole ones: take --page-size {block} or a "
            "multiple"),
    Refusal(lambda c, m: bool(m.topk and c.kv.sparse_dense_layers), ("kv.sparse_dense_layers",), _CHOOSES),
    Refusal(lambda c, m: c.kv.hot_buffer_tokens is not None and c.kv.hot_buffer_tokens < m.topk,
            ("kv.hot_buffer_tokens",), "it holds what one step reads, and this model reads {topk} tokens: at "
            "least as many"),
    Refusal(lambda c, m: max(_dense(c), default=0) >= m.layers, ("kv.sparse_dense_layers",),
            "this model has layers 0 to {last}"),
    Refusal(lambda c, m: _dense(c) == set(range(m.layers)), ("kv.sparse_dense_layers",),
            "names every layer: leave --sparse-top-k out instead"),
    Refusal(lambda c, m: c.kv.host_decode in ("auto", "always") and _reads_all(c, m), ("kv.host_decode",),
            "this model reads all of its KV in each step, which is too slow from host memory: also give "
            "--sparse-top-k N"),
    Refusal(lambda c, m: c.kv.hot_buffer_tokens is not None and _reads_all(c, m), ("kv.hot_buffer_tokens",),
            "this model reads all of its KV in each step, from the GPU: also give --sparse-top-k N, or leave "
            "this out"),
    Refusal(lambda c, m: c.kv.sparse_metadata_dtype != "auto" and _reads_all(c, m), ("kv.sparse_metadata_dtype",),
            "this model reads all of its KV in each step: also give --sparse-top-k N, or leave this out"),
    Refusal(lambda c, m: 0 < (c.device.gpu_layers or 0) < m.layers, ("device.gpu_layers",),
            "this model has {layers} layers, and all of them run on one device: as many at least, or 0 for "
            "the CPU"),
    Refusal(_other_layers, ("device.pp", "device.pp_layers"),
            "this model has {layers} layers, of which each stage takes one or more"),
    Refusal(lambda c, m: not _other_layers(c, m) and c.device.pp > m.stages, ("device.pp",),
            "layers {front} to {last} of this model share KV, and are of one stage: at most {stages} stages"),
    Refusal(lambda c, m: not _other_layers(c, m) and c.device.pp <= m.stages and _parts_tail(c, m),
            ("device.pp", "device.pp_layers"),
            "layers {front} to {last} of this model share KV, and are of one stage: the last number of --pp-layers is "
            "{tail} or more"),
    Refusal(lambda c, m: c.device.tp > min(m.heads, m.vocab, m.width), ("device.tp",),
            "this model has {heads} query heads, a vocabulary of {vocab} and MLPs of {width} columns; each TP "
            "rank needs one or more of each"),
    Refusal(lambda c, m: c.device.expert_ranges > 1 and not m.experts,
            ("device.ep",), "this model has no experts: leave it out"),
    Refusal(lambda c, m: 0 < m.experts < c.device.expert_ranges, ("device.ep",),
            "this model has {experts} experts, and each group needs one or more"),
    Refusal(lambda c, m: c.kv.state_interval is not None and not m.state_bytes, ("kv.state_interval",),
            "this model has no layers that keep a state: leave it out"),
    Refusal(lambda c, m: c.kv.window_interval > 0 and not m.windows, ("kv.window_interval",),
            "this model has no layers with a sliding window: leave it out"),
    Refusal(lambda c, m: c.schedule.speculative_method == "mtp" and not m.mtp,
            ("schedule.speculative_method",), "this model's files have no MTP layer: take ngram"),
    Refusal(lambda c, m: c.device.tp > m.state_parts > 0, ("device.tp",),
            "the recurrent states of this model have {state_parts} parts, and each TP rank needs one or more: take "
            "--tp {state_parts} at most, and --pp for more ranks"),
    Refusal(lambda c, m: c.pair.disaggregation_mode is not None and m.state_bytes > STATE_MAX,
            ("pair.disaggregation_mode",), "a key head's state of this model has {state_bytes} bytes, and a "
            f"message between instances has at most {STATE_MAX}: leave it out"),
)


def check_model(config: Config, model: ModelFacts) -> None:
    """Raises ConfigError with every reason, one a line."""
    if reasons := [r.text(config, model) for r in OF_MODEL if r.when(config, model)]:
        raise ConfigError("\n".join(reasons))
