"""Engines of tiny models whose requests read all of their KV, and the prompts that tests play."""
from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace

import ranks
import torch
import where
from dense_attend import Dense
from driven import PAGE, InProcess

from penstock.config.request.params import SamplingParams
from penstock.config.request.selection import indexer_selection
from penstock.core.plan import Outcome
from penstock.exec.drafts.drafter import OnLast
from penstock.memory.lateness import Promptly
from penstock.model.base import CacheShape, LocalLayer, Stage
from penstock.model.eagle3 import Eagle3, read_eagle

CONFIG = {
    "model_type": "qwen3", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
LATENT = {
    "model_type": "deepseek_v32", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "first_k_dense_replace": 2, "num_attention_heads": 4, "q_lora_rank": 24,
    "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "index_n_heads": 4,
    "index_head_dim": 16, "index_topk": 4, "n_routed_experts": 2, "num_experts_per_tok": 1,
    "moe_intermediate_size": 8, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
}
# A window of one page and a half; page edges and windows never fall together for long.
WINDOW = {**CONFIG, "use_sliding_window": True, "sliding_window": 6,
          "layer_types": ["sliding_attention", "full_attention"]}
# As that, with sinks, and experts that clamp.
SINKS = {
    "model_type": "gpt_oss", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "sliding_window": 6, "num_local_experts": 5,
    "num_experts_per_tok": 2, "swiglu_limit": 1.5,
}
# One cache group; two, and a choice of 4 tokens; two, of which one keeps a window.
# And one group of MLA KV entries, of which all are read.
MLA = {key: value for key, value in LATENT.items() if not key.startswith("index")} | {
    "model_type": "deepseek_v3"}
# A state in front of attention that is gated; states are kept every four pages.
STATE = {**{key: value for key, value in CONFIG.items() if "num_k" not in key}, "model_type": "qwen3_next",
         "num_key_value_heads": 2, "layer_types": ["linear_attention", "full_attention"],
         "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 6,
         "linear_value_head_dim": 4, "num_experts": 0, "partial_rotary_factor": 0.5}
# Heads of two widths, a layer that reads the KV of another of each kind, inputs of each layer, experts beside the MLP.
GEMMA = {
    "model_type": "gemma4_text", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 5,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16,
    "num_global_key_value_heads": 1, "attention_k_eq_v": True, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
    "sliding_window": 6, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 4,
    "vocab_size_per_layer_input": 61, "enable_moe_block": True, "num_experts": 5, "top_k_experts": 2,
    "moe_intermediate_size": 8, "tie_word_embeddings": False,
    "layer_types": ["full_attention", *["sliding_attention", "full_attention"] * 2],
}
INTERVAL = 16
CONFIGS = {"grouped": CONFIG, "latent": LATENT, "window": WINDOW, "mla": MLA, "sinks": SINKS,
           "state": STATE, "gemma4": GEMMA}
# Models with a layer that drafts, of MLA KV entries that are all read and of such that choose, and of gated KV
# heads behind a state.
MTP = {"mtp": {**MLA, "num_nextn_predict_layers": 1}, "mtp_chosen": {**LATENT, "num_nextn_predict_layers": 1},
       "mtp_state": STATE}
# Rows that the CPU's own kernel takes.
MTP["mtp_lanes"] = {**MTP["mtp"], "kv_lora_rank": 32, "qk_rope_head_dim": 16}
# What drafts for these, with half of their words.
EAGLES = {"eagle": CONFIG, "eagle_latent": MLA}
EAGLE = {**CONFIG, "model_type": "llama", "num_hidden_layers": 1, "draft_vocab_size": 40,
         "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 1]}}
EXPERTS = {**CONFIG, "model_type": "qwen3_moe", "num_experts": 5, "num_experts_per_tok": 2,
           "moe_intermediate_size": 24, "norm_topk_prob": True}
GREEDY = SamplingParams(temperature=0.0)


@functools.cache
def model(family="grouped", stage=None):
    config = {**CONFIGS, **MTP, **EAGLES, "experts": EXPERTS}[family]
    drafts = family in MTP
    if stage is not None:
        made = where.model(config, torch.float32, 5, 10, replace(
            stage, drafts=drafts and stage.heads, inputs=(drafts or family in EAGLES) and stage.heads))
        if drafts and stage.heads:                      # as the whole one was taught
            made._draft = model(family)._draft
        if family in EAGLES:
            draft = model(family)._draft
            made.take_drafts(draft) if stage.heads else made.tap(draft.taps)
        return made
    if family in EAGLES:
        made = where.model(config, torch.float32, 5, 10)
        made.take_drafts(_eagle(made))
        return made
    if not drafts:
        return where.model(config, torch.float32, 5, 10)
    layers = config["num_hidden_layers"]
    made = where.model(config, torch.float32, 5, 10, Stage(0, layers, True, True, drafts=True))
    _teach(made)
    return made


def _teach(made) -> None:
    """Its layer that drafts guesses, from a token and the hidden state before it, the hidden state behind
    it: in the sense of least squares over random texts, but for what its own halves add."""
    random = torch.Generator().manual_seed(1)
    draft, seen, want = made._draft, [], []
    for half in (draft.layer.attention.out, draft.layer.mlp.down):
        half.op = functools.partial(_scaled, half.op, 0.3)
    with torch.inference_mode():
        for _ in range(40):
            ids_T, at_T = where.sequence(torch.randint(61, (24,), generator=random).tolist())
            hidden_TD = made.forward(ids_T, at_T, Dense(made.reads, made.groups))
            both = [torch.nn.functional.rms_norm(x, x.shape[-1:], norm.value, 1e-6) for x, norm in (
                (made.embed(ids_T[1:]).h_TD, draft.norm_token), (hidden_TD[:-1], draft.norm_hidden))]
            seen.append(torch.cat(both, 1))
            want.append(hidden_TD[1:])
        fit = torch.linalg.lstsq(torch.cat(seen), torch.cat(want)).solution
    draft.joint.op = lambda x_TI: x_TI @ fit


def _eagle(of) -> Eagle3:
    """Its head guesses what the model's says, in the sense of least squares over random texts."""
    spec = read_eagle(EAGLE, of.spec, "here")
    pack = lambda w, b: functools.partial(torch.nn.functional.linear, weight=w)  # noqa: E731
    made = Eagle3(spec, torch.float32, pack, of._slots.ops)
    random = torch.Generator().manual_seed(2)
    for name, shape in made.shapes():
        weight = torch.randn(shape, generator=random) * (1 if name.endswith("norm.weight") else 0.3)
        made.load(name, weight.to(where.DEVICE))
    word_V = torch.randperm(61, generator=random)[:spec.words].sort().values.to(where.DEVICE)
    made.load("d2t", word_V - torch.arange(spec.words, device=where.DEVICE))
    made.finish()
    seen, want = [], []
    of.take_drafts(made)
    with torch.inference_mode():
        for _ in range(60):
            ids_T, at_T = where.sequence(torch.randint(61, (24,), generator=random).tolist())
            hidden_TD = of.made(last_TD := of.forward(ids_T, at_T, Dense(of.reads, of.groups)))
            out_TD = of.draft(ids_T[1:], hidden_TD[:-1], at_T[1:], Dense({LocalLayer(0): of.drafting}))
            seen.append(torch.nn.functional.rms_norm(out_TD, out_TD.shape[-1:], made.norm_last.value, 1e-6))
            want.append(of.logits(last_TD[1:])[:, word_V])
        fit = torch.linalg.lstsq(torch.cat(seen), torch.cat(want)).solution
    made.head.op = lambda x_TI: x_TI @ fit
    of._draft, of.groups = None, tuple(group for group in of.groups if not group.drafts)
    return made


def _scaled(op, factor, x):
    return op(x) * factor


# Each layer a group, and what a selector would have: a quarter of a page of theirs, less two rows.
THREE = (CacheShape(name="even", layers=(0,), num_kv_heads=2, head_dim=8),
         CacheShape(name="odd", layers=(1,), num_kv_heads=2, head_dim=8),
         CacheShape(name="index", layers=(0, 1), num_kv_heads=1, head_dim=7, planes=1, unit=2,
                    selector=True))


@functools.cache
def dense(prompt: tuple[int, ...], n: int, family="grouped") -> tuple[int, ...]:
    """Greedy tokens, recomputing everything for each. Every choice is clear-cut."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(n):
            m = model(family)
            hidden = m.forward(*where.sequence(tokens), Dense(m.reads, m.groups))
            best = m.logits(hidden[-1:])[0].topk(2)
            assert best.values[0] - best.values[1] > 3e-5, "choose another seed for the weights"
            tokens.append(int(best.indices[0]))
    return tuple(tokens[len(prompt):])


@dataclass
class Engine(InProcess):
    hbm_pages: int = 64
    dram_pages: int = 64
    step_tokens: int = 64
    chunk_multiple: int = 1
    wait_pages: int = 0
    take_pages: int = 3                         # most prompts have more
    overlap: bool = True
    rows: int = 4
    lateness: object = field(default_factory=Promptly)
    backend: str | None = field(default_factory=lambda: None if where.DEVICE == "cuda" else "reference")
    groups: tuple[CacheShape, ...] = ()         # of the model; () for its own
    family: str = "grouped"
    storage: object = None                      # made of the host pools; and pages that the core remembers
    disk_pages: int = 0
    draft_tokens: int = 0
    drafter: object = None

    def __post_init__(self) -> None:
        latent = self.family in ("latent", "mtp_chosen")
        rows = latent or self.family in ("mla", "mtp", "mtp_lanes", "eagle_latent")
        groups = tuple(replace(group, page_tokens=PAGE if group.drafts else INTERVAL)
                       if group.snapshot else group for group in self.groups or model(self.family).groups)
        self.build(functools.partial(model, self.family), groups,
                   selection=indexer_selection(4) if latent else None, max_len=64,
                   num_layers=model(self.family).spec.num_layers,
                   layers=(1, 4) if ranks.NUM[0] > 1 and self.family == "gemma4" else (),
                   backend=None if rows and where.DEVICE == "cuda" else self.backend,
                   lateness=self.lateness, rows=self.rows, hbm_pages=self.hbm_pages,
                   dram_pages=self.dram_pages, step_tokens=self.step_tokens, chunk_multiple=self.chunk_multiple,
                   wait_pages=self.wait_pages,
                   take_pages=self.take_pages, overlap=self.overlap, storage=self.storage,
                   drafter=self.drafter or self._on_last(), draft_tokens=self.draft_tokens,
                   disk_pages=self.disk_pages, store_root=b"an engine" if self.disk_pages else b"")

    def _on_last(self) -> OnLast | None:
        """A layer drafts on the last of several stages."""
        name = model(self.family).drafter
        return OnLast(name) if name and self.draft_tokens and ranks.NUM[0] > 1 else None

    def add(self, rid: int, prompt: tuple[int, ...], max_new: int, params=GREEDY, **more) -> None:
        self.tell(rid, prompt, max_new, params, **more)


SHARED = (7, 3, 29, 41, 5, 5, 18, 60, 2, 33, 9)
BACKENDS = where.backends()
# Device pages of group 0, too few.
SMALL = {"grouped": 11, "latent": 18, "experts": 11, "window": 13, "mla": 11, "sinks": 13, "state": 12,
         "gemma4": 12, "mtp": 20, "mtp_chosen": 34, "mtp_state": 24, "mtp_lanes": 20, "eagle": 16, "eagle_latent": 20}
PROMPTS = {1: (*SHARED, 1, 2), 2: (*SHARED, 40), 3: (50,), 4: SHARED * 2, 5: (12, 8, 30, 21),
           6: SHARED[:8], 7: (*SHARED, *SHARED, 4, 4)}


def play(engine: Engine, script=lambda turn: (), new: int = 12, arrive=lambda rid: 2 * rid) -> None:
    """All PROMPTS, one after the other, with the events that `script` adds at each turn."""
    waiting = dict(PROMPTS)
    for turn in range(400):
        for rid in [r for r in waiting if turn >= arrive(r)]:
            engine.add(rid, waiting.pop(rid), new)
        engine.inbox += script(turn)
        engine.turn()
    engine.drain()
    assert {rid: tuple(t) for rid, t in engine.got.items()} == {
        rid: dense(p, new, engine.family) for rid, p in PROMPTS.items()}
    assert {f.outcome for f in engine.ended.values()} == {Outcome.LENGTH}
