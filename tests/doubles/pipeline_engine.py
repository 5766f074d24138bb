"""An engine of a tiny model from a checkpoint, driven by the real core; its stages are processes where
`pp` is more than 1. Pauses come from the caller."""
from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from safetensors.torch import save_file

from penstock.config.cli import from_options
from penstock.config.params import SamplingParams
from penstock.config.platform import probe
from penstock.config.resolve import resolve
from penstock.config.selection import attention_identity
from penstock.core.core import Core
from penstock.core.plan import Arrived, Event, Finished, Paused, RequestId, Token
from penstock.exec.build import Built, build_engine
from penstock.model import registry

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 97,
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_theta": 10000.0, "hidden_act": "silu",
}
PROMPTS = {rid: tuple((rid * 31 + i * i * 7 + i) % 97 for i in range(40 + 35 * rid)) for rid in range(1, 6)}


def checkpoint(folder: Path) -> str:
    """Weights whose greedy choices are clear-cut."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file({name: (t if "norm" in name else t * 8).contiguous()
               for name, t in registry.dummy_tensors(CONFIG, 3)}, folder / "model.safetensors")
    return str(folder)


class Pipeline:
    """A `with` of it ends its processes."""

    def __init__(self, model: str, **options: object) -> None:
        whole = {"dtype": "float32", "threads": 1, "page_size": 8, "max_num_seqs": 4, "seed": 1,
                 "step_tokens": 48, **options}
        self.lines: list[str] = []
        self.built: Built = build_engine(resolve(from_options(model, whole), probe()), self.lines.append)
        self.core, self.ex = Core(self.built.core_config), self.built.executor
        self.got: dict[int, list[int]] = {}
        self.ended: dict[int, Finished] = {}
        self.reads: dict[int, dict[str, int]] = {}
        self.inbox: list[Event] = []

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        if self.built.crew is not None:
            self.built.crew.close()

    def add(self, rid: int, prompt: tuple[int, ...], max_new: int, **sampling) -> None:
        selection = self.built.selection
        budget = selection.budget if selection else None
        params = SamplingParams(temperature=0.0, top_k_tokens=budget, **sampling)
        self.ex.open(RequestId(rid), prompt, params)
        self.got[rid] = []
        self.inbox.append(Arrived(RequestId(rid), prompt, max_new, selects=selection is not None,
                                  attention=attention_identity(selection) if selection else 0))

    def turn(self) -> bool:
        events, self.inbox = self.inbox, []
        while True:
            advance = self.core.advance(events)
            events = []
            for o in advance.outputs:
                match o:
                    case Token(rid, _, token):
                        self.got[rid].append(token)
                    case Finished(rid):
                        self.ended[rid] = o
                        self.reads[rid] = self.ex.kv_reads(rid) or {}
                        self.ex.close(rid)
            if advance.plan is None:
                break
            self.ex.submit(advance.plan)
        self.core.check()
        found = self.ex.poll(block=True)
        self.inbox += found
        return bool(found)

    def play(self, new: int = 24,
             pauses: Callable[[int], Iterable[int]] = lambda turn: ()) -> dict[int, list[int]]:
        """All PROMPTS at once; what they say."""
        for rid, prompt in PROMPTS.items():
            self.add(rid, prompt, new)
        for turn in range(4000):
            self.inbox += [Paused(RequestId(rid)) for rid in pauses(turn) if rid not in self.ended]
            if not self.turn():
                break
        assert set(self.ended) == set(PROMPTS), "a request never ended"
        return self.got
