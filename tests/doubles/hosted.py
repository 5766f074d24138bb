"""An engine of tiny models whose requests select, for conformance: pools with several groups, NaN in all that
is free, disjoint ids.

Six kinds, by the same scenes: KV heads chosen by bounds (page 4, unit 2; a budget of 12 tokens, a hot
buffer of 16, contexts of 130 and more), the same beside a layer with a window, without and with sinks, with
entries that three layers read, or beside one that keeps a state, and MLA KV entries chosen by the model's
indexer (index_topk 16, a hot buffer of 20, contexts of 161 and more).
"""
from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

import ranks
import torch
import where
from driven import PAGE, InProcess
from late_copies import Latest, Shuffled

from penstock.config.request.params import SamplingParams
from penstock.config.request.selection import Selection, attention_identity, indexer_selection
from penstock.config.settings.tree import KVConfig
from penstock.core.plan import Outcome
from penstock.exec.load.sizing import groups_of
from penstock.memory.lateness import Promptly

CONFIG = {
    "model_type": "qwen3", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
LATENT = {
    "model_type": "deepseek_v32", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 3, "first_k_dense_replace": 3, "num_attention_heads": 4, "num_key_value_heads": 4,
    "q_lora_rank": 24, "kv_lora_rank": 48, "qk_nope_head_dim": 12, "qk_rope_head_dim": 16, "v_head_dim": 12,
    "index_n_heads": 4, "index_head_dim": 16, "index_topk": 16, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 10000.0, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1,
    "n_shared_experts": 1,
}
# One of the layers keeps a window, of no whole number of pages, and stays on the device.
WINDOW = {**CONFIG, "use_sliding_window": True, "sliding_window": 10,
          "layer_types": ["full_attention", "sliding_attention", "full_attention"]}
# One of the layers keeps a state.
STATES = {**CONFIG, "model_type": "qwen3_next", "num_experts": 0, "partial_rotary_factor": 0.5,
          "layer_types": ["full_attention", "linear_attention", "full_attention"], "linear_num_key_heads": 1,
          "linear_num_value_heads": 2, "linear_key_head_dim": 6, "linear_value_head_dim": 4}
# As with a window, and heads have sinks.
SINKS = {
    "model_type": "gpt_oss", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 24,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "num_local_experts": 3, "num_experts_per_tok": 2,
    "swiglu_limit": 1.5, "sliding_window": 10,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
}
# Heads of two widths, and two layers that read the KV of one: three readers of each of its entries.
SHARED = {
    "model_type": "gemma4_text", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "sliding_window": 10, "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 61, "tie_word_embeddings": False,
    "layer_types": [*["full_attention", "sliding_attention"] * 2, "full_attention", "full_attention"],
}
MAX_LEN = 256


def text(seed: int, n: int) -> tuple[int, ...]:
    """A prompt of `n` tokens."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, 61, (n,), generator=generator).tolist())


@dataclass(frozen=True)
class Kind:
    """How requests select, and what is asked. A context is at least eight hot buffers. device: pages, too few
    for a prompt; cut: layers of two stages, (): any."""

    config: Mapping[str, object]
    selection: Selection
    prompts: Mapping[int, tuple[int, ...]]
    device: int = 24
    cut: tuple[int, ...] = ()

    @property
    def layers(self) -> int:
        return int(str(self.config["num_hidden_layers"]))

    @property
    def stages(self) -> tuple[int, ...]:
        """Layers of each, where there are several and not every cut is allowed."""
        return self.cut if ranks.NUM[0] > 1 else ()

    @property
    def budget(self) -> int:
        return self.selection.budget

    @property
    def hot_pages(self) -> int:
        """The budget, and one page."""
        return self.budget // PAGE + 1


KINDS = {
    "bounds": Kind(CONFIG, Selection(selector="bounds", version=1, unit=2, budget=12, sinks=2, window=3), {
        1: text(1, 130), 2: text(2, 131), 3: text(1, 96) + text(3, 40), 4: text(4, 129)}),
    "windowed": Kind(WINDOW, Selection(selector="bounds", version=1, unit=2, budget=12, sinks=2, window=3), {
        1: text(1, 130), 2: text(2, 131), 3: text(1, 96) + text(3, 40), 4: text(4, 129)}, device=29),
    "sinks": Kind(SINKS, Selection(selector="bounds", version=1, unit=2, budget=12, sinks=2, window=3), {
        1: text(1, 130), 2: text(2, 131), 3: text(1, 96) + text(3, 40), 4: text(4, 129)}, device=29),
    "states": Kind(STATES, Selection(selector="bounds", version=1, unit=2, budget=12, sinks=2, window=3), {
        1: text(1, 130), 2: text(2, 131), 3: text(1, 96) + text(3, 40), 4: text(4, 129)}),
    "shared": Kind(SHARED, Selection(selector="bounds", version=1, unit=2, budget=12, sinks=2, window=3), {
        1: text(1, 130), 2: text(2, 131), 3: text(1, 96) + text(3, 40), 4: text(4, 129)}, device=29, cut=(1, 5)),
    "latent": Kind(LATENT, indexer_selection(16), {
        1: text(1, 162), 2: text(2, 163), 3: text(1, 128) + text(3, 40), 4: text(4, 161)}),
}
BLOCKS = {
    "model_type": "minimax_m3", "vocab_size": 61, "hidden_size": 32, "dense_intermediate_size": 48,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rotary_dim": 8,
    "intermediate_size": 24, "shared_intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "moe_layer_freq": [0, 0, 1, 1], "sparse_attention_config": {
        "sparse_attention_freq": [0, 1, 1, 1], "sparse_num_index_heads": 2, "sparse_index_dim": 16,
        "sparse_block_size": 2},
}
KINDS["blocks"] = Kind(BLOCKS, indexer_selection(12, 2), {
    1: text(1, 130), 2: text(2, 131), 3: text(1, 96) + text(3, 40), 4: text(4, 129)}, device=29)
FORMAT = [KVConfig()]       # of their pages
KIND = ["bounds"]       # of the engines to come: the fixture `kinds` of conformance sets it


def kind() -> Kind:
    return KINDS[KIND[0]]


def model_of(selection: Selection):
    """Makes a stage of the model; None: all of it."""
    return functools.partial(_model, KIND[0], selection.budget // selection.unit if selection.native else 0)


@functools.cache
def _model(name: str, topk: int, stage=None):
    """topk: what its selector takes."""
    config = dict(KINDS[name].config)
    if "sparse_attention_config" in config:
        config["sparse_attention_config"] = {**config["sparse_attention_config"], "sparse_topk_blocks": topk}
    elif topk:
        config["index_topk"] = topk
    return where.model(config, torch.float32, 5, 10, stage)


model = functools.partial(_model, "bounds", 0)       # of an ordinary engine


@dataclass
class Engine(InProcess):
    """`selection`: the largest that it gives. hot_pages 0: no row is ever hosted: the reference."""

    hbm_pages: int = field(default_factory=lambda: kind().device)
    dram_pages: int = 400
    hot_pages: int = field(default_factory=lambda: kind().hot_pages)
    hot_pages_max: int = 0
    step_tokens: int = 64
    overlap: bool = True
    always: bool = False
    lateness: object = field(default_factory=Promptly)
    selection: Selection = field(default_factory=lambda: kind().selection)
    storage: object = None                      # made of the host pools; and pages that the core remembers
    disk_pages: int = 0
    draft_tokens: int = 0
    drafter: object = None

    def __post_init__(self) -> None:
        made = model_of(self.selection)
        self.build(
            made, groups_of(made(), self.selection, FORMAT[0]), selection=self.selection, num_layers=kind().layers,
            layers=kind().stages, max_len=MAX_LEN, lateness=self.lateness, rows=4, hbm_pages=self.hbm_pages,
            dram_pages=self.dram_pages, hot_pages=self.hot_pages, hot_pages_max=self.hot_pages_max,
            always_hosted=self.always,
            draft_tokens=self.draft_tokens, drafter=self.drafter,
            step_tokens=self.step_tokens, overlap=self.overlap, wait_pages=1000, storage=self.storage,
            disk_pages=self.disk_pages, store_root=b"root" if self.disk_pages else b"")

    def add(self, rid: int, prompt: tuple[int, ...], max_new: int, budget: int | None = None,
            **sampling) -> None:
        """A request that selects `budget` tokens, None: the engine's most; 0: one that reads all."""
        budget = self.selection.budget if budget is None else budget
        assert budget == self.selection.budget or not self.selection.native, "the model chooses as it does"
        params = SamplingParams(**({"temperature": 0.0, "sparse_top_k": budget} | sampling))
        self.tell(rid, prompt, max_new, params, selects=budget > 0,
                  attention=attention_identity(self.selection.within(budget)) if budget else 0)


def resident(prompt: tuple[int, ...], new: int, budget: int | None = None) -> tuple[int, ...]:
    """The tokens of a request alone on a device that holds it: whatever happens to it, these are right.
    budget: as `Engine.add` takes it; with an indexer 0 is a model that chooses all there are."""
    return _resident(KIND[0], FORMAT[0], prompt, new, kind().budget if budget is None else budget)


@functools.cache
def _resident(name: str, kept: KVConfig, prompt: tuple[int, ...], new: int, budget: int) -> tuple[int, ...]:
    stages, ranks.NUM = ranks.NUM, [1]
    selection = kind().selection
    if selection.native:
        selection = selection.within(budget or MAX_LEN)
        budget = selection.budget
    engine = Engine(hbm_pages=200, dram_pages=0, hot_pages=0, overlap=False, selection=selection)
    ranks.NUM = stages
    engine.add(1, prompt, new, budget)
    engine.drain()
    assert budget == 0 or engine.total("hot_misses") == 0 < engine.total("selected_device")
    return tuple(engine.got[1])


NEW = 24
LATENESS = {"thread": lambda: None, "latest": Latest, "shuffled": lambda: Shuffled(1),
            "torn": lambda: Shuffled(2, torn=0.3)}


def hosted_work(engine: Engine) -> None:
    """The slow path ran: misses, evictions, rows read from the host."""
    assert min(len(p) for p in kind().prompts.values()) >= 8 * kind().hot_pages * PAGE
    for name in ("hot_misses", "hot_evictions", "host_rows_read", "hot_hits"):
        assert engine.total(name) > 0, name


def resizing(engine: Engine, every: int = 2):
    """A script: hot buffers that have grown lose all of that every few turns, and may grow again."""
    def script(turn):
        if turn % every == 0:
            engine.core.kv.trim_hot_buffers([1 << 30] * len(engine.core.cfg.groups))
        return ()
    return script


def sizes(engine: Engine) -> list[int]:
    """Pages of each hot buffer that was resized, in order."""
    return [len(resize.pages) for plan in engine.plans for resize in plan.resizes]


def play(engine: Engine, script=lambda turn: (), new: int = NEW, arrive=lambda rid: 3 * rid,
         prompts: Mapping[int, tuple[int, ...]] | None = None, aborts=()) -> None:
    """All prompts, with the events that `script` adds at each turn; tokens are those of the resident, all of
    them but where the script aborts: a row without finite logits is ended too."""
    prompts = kind().prompts if prompts is None else prompts
    waiting = dict(prompts)
    for turn in range(600):
        for rid in [r for r in waiting if turn >= arrive(r)]:
            engine.add(rid, waiting.pop(rid), new)
        engine.inbox += script(turn)
        if not engine.turn() and not waiting:
            break
    engine.drain()
    # Nothing is damaged here: a request that was computed again has read what was not its own.
    assert not engine.core.counters["computed_again"], "a request was computed again"
    for rid, prompt in prompts.items():
        want = resident(prompt, new)
        got = tuple(engine.got[rid])
        assert got == want[:len(got)], f"request {rid}"
        whole = len(got) == new or (rid in aborts and engine.ended[rid].outcome is Outcome.ABORT)
        assert whole, f"request {rid} has {len(got)} tokens of {new}"
