"""Decoding with drafts of which a known share is right: random weights, one GPU.

    python lab/device/drafts.py OUT [--hosted] [--layers N] [--rows 1,8,64] [--drafts 3] [--new 256]

Qwen3-8B's shape; hosted: W1b of `latent.py`, always out of host pages, prompts of 65,536 tokens that are
known, and rows 1 and 8. Requests without drafts first, then a drafter that proposes noise says what steps
of that width answer; the next ones know it, and err by dice. Rates are of tokens behind the first, of steps
between first and last; the median of three runs. misses: units that came from the host, a token of an answer.
"""
from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

import latent
import torch
from direct import QWEN3_8B, Direct, build_model, spread, write
from hosted import counts
from torch import Tensor

from penstock.core.plan import RequestId, Row
from penstock.exec.drafts.device import OnDevice
from penstock.exec.drafts.drafter import Drafter, DraftQuery


class Dice(Drafter):
    """Says the next tokens of the answer to this prompt, each with this chance."""

    name = "dice"

    def __init__(self, vocab: int) -> None:
        self.vocab, self.chance, self.random = vocab, 0.0, random.Random(0)
        self.answers: dict[tuple[int, ...], list[int]] = {}

    def propose(self, asks: Sequence[DraftQuery]) -> Sequence[Sequence[int]]:
        return [self._of(ask) for ask in asks]

    def _of(self, ask: DraftQuery) -> list[int]:
        answer = self.answers.get(tuple(ask.prompt), [])[len(ask.outputs):][:ask.most]
        answer += [0] * (ask.most - len(answer))
        return [token if self.random.random() < self.chance else (token + 1) % self.vocab
                for token in answer]

    def forget(self, rid: RequestId) -> None:
        return

    def on_device(self, rows: int, max_len: int, device: torch.device) -> OnDevice:
        return Thrown(self, rows, max_len, device)


class Thrown(OnDevice):
    """What is thrown for a row when it is bound."""

    def __init__(self, dice: Dice, rows: int, max_len: int, device: torch.device) -> None:
        self._dice = dice
        self._draft_RL = torch.zeros(rows + 1, max_len + 32, dtype=torch.int64, device=device)

    def put(self, row: int, first: int, prompt: Sequence[int], outputs: Sequence[int]) -> None:
        if first < len(prompt):
            most = self._draft_RL.shape[1] - len(prompt)
            self._draft_RL[row, len(prompt):] = torch.tensor(self._dice.propose(
                [DraftQuery(RequestId(0), Row(0), tuple(prompt), (), most)])[0])

    def propose(self, index_N: Tensor, at_N: Tensor, last_N: Tensor, most_N: Tensor, most: int) -> Tensor:
        next_ND = at_N.clamp(min=0).long()[:, None] + torch.arange(1, most + 1, device=at_N.device)
        return self._draft_RL[index_N[:, None], next_ND]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--hosted", action="store_true")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--rows", default="")
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=0)
    parser.add_argument("--chances", default="0.7,0,1")
    args = parser.parse_args()
    hosted, told = args.hosted, list[dict[str, object]]()
    length = args.prompt or (65536 if hosted else 512)
    vocab = 31000 if hosted else QWEN3_8B["vocab_size"]
    model = (latent.build_model(*latent.WORK["W1b"]) if hosted else
             build_model(QWEN3_8B | {"num_hidden_layers": args.layers}))
    for rows in map(int, (args.rows or ("1,8" if hosted else "1,8,64")).split(",")):
        generator = torch.Generator().manual_seed(rows)
        prompts = torch.randint(0, vocab, (rows, length), generator=generator).tolist()
        dice, max_len = Dice(vocab), length + args.new + 64
        tokens = rows * (max_len + 64)
        # The host has room for index keys too: a prompt is not computed twice.
        more = dict(hosted=True, dram_tokens=int(1.4 * tokens), prefix_cache=True, page_size=64,
                    hot_tokens=max(4, 1 + args.drafts) * latent.TOPK) if hosted else {}
        one = Direct(model, rows=rows, max_len=max_len, hbm_tokens=2 * tokens if hosted else tokens,
                     buckets=(rows,), drafter=dice, drafts=args.drafts, **more)
        for prompt in prompts if hosted else ():
            one.run([prompt], 1)
        one.run(prompts, 16)
        for chance in (None, -1.0, *map(float, args.chances.split(","))):   # without; what is it?; by dice
            dice.chance, rates, before = chance or 0.0, [], one.rank.stats()
            missed, runs = counts(one).get("hot_misses_total", 0), 1 if chance == -1.0 else 3
            for _ in range(runs):
                ran = one.run(prompts, args.new, drafts=0 if chance is None else None)
                rates.append(rows * (args.new - 1) / (ran.wall_s - max(ran.first_s.values())))
            if chance == -1.0:
                dice.answers = dict(zip(map(tuple, prompts), ran.tokens.values(), strict=True))
                continue
            right, asked, ahead, alone = (sum(v - before.get(k, 0) for k, v in one.rank.stats().items() if k.
                startswith(name)) for name in ("spec_accepted_tokens", "spec_draft_tokens",
                                               *(f'executor_steps_total{{launch="{way}"' for way in (
                                                   "ahead", "alone"))))
            missed = counts(one).get("hot_misses_total", 0) - missed
            told.append({"rows": rows, "drafts": args.drafts, "chance": chance, "tokens_per_s": spread(rates),
                         "accepted": right, "drafted": asked, "steps_ahead": ahead, "steps_alone": alone,
                         "misses": missed / runs / rows / args.new})
            write("drafts", args.out, told)
        del one
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
