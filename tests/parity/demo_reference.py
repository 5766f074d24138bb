"""What transformers says for the demo model: the definition that penstock's greedy output is held to.

Owns the reference model (float32, weights through our checkpoint reader, which has tests of its own)
and the rule about ties. Knows nothing of engines.
"""
from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.model.weights.checkpoint import open_checkpoint
from penstock.model.weights.locate import ModelFiles

TIE = 1e-3          # the reference's two best logits this near: either is right, in float32
LOGPROB = 1e-3      # how far our logprob of the same token may be from the reference's
DATA = Path(__file__).parents[1] / "data"

Tokens = tuple[int, ...]


def conversations() -> list[tuple[str, list[dict[str, str]]]]:
    """(language, messages): 8 languages, 5 conversations each."""
    chats = json.loads((DATA / "demo_chats.json").read_text(encoding="utf-8"))
    return [(language, messages) for language, several in chats.items() for messages in several]


def long_text(num_words: int, seed: int) -> str:
    """Words of all conversations in a seeded order: text that no file's change can change."""
    words = [w for _, messages in conversations() for m in messages for w in m["content"].split()]
    rng = random.Random(seed)
    return " ".join(rng.choice(words) for _ in range(num_words))


@dataclass(frozen=True, slots=True)
class Tie:
    """A choice on which penstock and the reference differ, and may."""

    prompt: Tokens
    index: int            # of the output token
    ours: int
    reference: int
    gap: float            # between the reference's two best logits

    def __str__(self) -> str:
        return (f"prompt of {len(self.prompt)} tokens, output {self.index}: {self.ours} for "
                f"{self.reference}, whose logit leads by {self.gap:.1e}")


def near(logprobs: Sequence[float], reference: Sequence[float]) -> None:
    """Asserts that `logprobs`, if any were asked for, are the reference's."""
    worst = max((abs(a - b) for a, b in zip(logprobs, reference, strict=bool(logprobs))), default=0.0)
    assert worst <= LOGPROB, f"a logprob is {worst:.4f} away from the reference's"


@dataclass(slots=True, repr=False)
class Reference:
    """Judges outputs. `ties` lists every difference that did not count, `gap_min` the nearest two
    best logits seen."""

    model: LlamaForCausalLM
    ties: list[Tie] = field(default_factory=list)
    gap_min: float = float("inf")
    num_choices: int = 0
    _judged: dict[tuple[Tokens, Tokens], list[float]] = field(default_factory=dict)

    @classmethod
    def load(cls, files: ModelFiles) -> Reference:
        model = LlamaForCausalLM(LlamaConfig(**files.config)).float().eval()
        weights = dict(open_checkpoint(files).tensors())
        # The head is tied: the file holds the embedding once.
        missing, unexpected = model.load_state_dict(weights, strict=False, assign=True)
        assert set(missing) <= {"lm_head.weight"} and not unexpected
        model.tie_weights()
        assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
        return cls(model)

    @torch.inference_mode()
    def greedy(self, prompt: Tokens, num_new: int) -> tuple[Tokens, list[float]]:
        """Token by token with a KV cache, batch 1: what `generate` does, and nothing else.
        Returns the tokens and their logprobs."""
        tokens: list[int] = []
        logprobs: list[float] = []
        out = self.model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
        for _ in range(num_new):
            best = out.logits[0, -1].topk(2)
            self._note(float(best.values[0] - best.values[1]))
            tokens.append(int(best.indices[0]))
            logprobs.append(float(out.logits[0, -1].log_softmax(-1)[tokens[-1]]))
            out = self.model(torch.tensor([tokens[-1:]]), past_key_values=out.past_key_values,
                             use_cache=True)
        return tuple(tokens), logprobs

    @torch.inference_mode()
    def judge(self, prompt: Tokens, tokens: Tokens, logprobs: Sequence[float] = ()) -> None:
        """Asserts that `tokens` are greedy: each is the reference's choice after all before it.

        One forward pass with the answer as input tells for every token, so that by induction the
        whole is what `greedy` gives; and it goes on behind a tie. An answer is judged once.
        """
        if (prompt, tokens) in self._judged:
            near(logprobs, self._judged[prompt, tokens])
            return
        logits_TV = self.model(torch.tensor([prompt + tokens[:-1]]), use_cache=False,
                               logits_to_keep=len(tokens)).logits[0]
        best = logits_TV.topk(2)
        for index, ours in enumerate(tokens):
            gap = float(best.values[index, 0] - best.values[index, 1])
            theirs = int(best.indices[index, 0])
            self._note(gap)
            if ours != theirs:
                behind = float(best.values[index, 0] - logits_TV[index, ours])
                assert behind <= TIE, (
                    f"output {index} after a prompt of {len(prompt)} tokens is {ours}, the reference "
                    f"says {theirs}, whose logit leads by {behind:.4f}")
                self.ties.append(Tie(prompt, index, ours, theirs, gap))
        at_TV = logits_TV.log_softmax(-1)
        self._judged[prompt, tokens] = [float(at_TV[i, token]) for i, token in enumerate(tokens)]
        near(logprobs, self._judged[prompt, tokens])

    def _note(self, gap: float) -> None:
        self.num_choices += 1
        self.gap_min = min(self.gap_min, gap)

    def report(self) -> str:
        """What to print at the end of a run."""
        seen = [f"{self.num_choices} choices of the reference, the nearest two best logits are "
                f"{self.gap_min:.1e} apart; {len(self.ties)} differences below {TIE:g}"]
        return "\n  ".join(seen + [str(tie) for tie in self.ties])
