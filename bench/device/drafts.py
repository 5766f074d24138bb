"""Decoding with drafts of which a known share is right: Qwen3-8B's shape, random weights, one GPU.

    python bench/device/drafts.py OUT [--layers N] [--rows 1,8,64] [--drafts 3] [--new 256]

A drafter that proposes noise says what steps of that width answer; the next ones know it, and err by dice.
Rates are of tokens behind the first, of steps between first and last; the median of three runs.
"""
from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from direct import QWEN3_8B, Direct, build_model, spread, write

from penstock.core.plan import RequestId
from penstock.exec.drafts.drafter import Ask, Drafter


class Dice(Drafter):
    """Says the next tokens of the answer to this prompt, each with this chance."""

    name = "dice"

    def __init__(self) -> None:
        self.chance, self.random = 0.0, random.Random(0)
        self.answers: dict[tuple[int, ...], list[int]] = {}

    def propose(self, asks: Sequence[Ask]) -> Sequence[Sequence[int]]:
        return [self._of(ask) for ask in asks]

    def _of(self, ask: Ask) -> list[int]:
        answer = self.answers.get(tuple(ask.prompt), [])[len(ask.outputs):][:ask.most]
        answer += [0] * (ask.most - len(answer))
        return [token if self.random.random() < self.chance else (token + 1) % QWEN3_8B["vocab_size"]
                for token in answer]

    def forget(self, rid: RequestId) -> None:
        return


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--rows", default="1,8,64")
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=512)
    args = parser.parse_args()
    model, told = build_model(QWEN3_8B | {"num_hidden_layers": args.layers}), []
    for rows in map(int, args.rows.split(",")):
        generator = torch.Generator().manual_seed(rows)
        prompts = torch.randint(0, QWEN3_8B["vocab_size"], (rows, args.prompt), generator=generator).tolist()
        for drafts in (0, args.drafts):
            dice = Dice()
            one = Direct(model, rows=rows, max_len=args.prompt + args.new + 64,
                         hbm_tokens=rows * (args.prompt + args.new + 128), drafter=dice if drafts else None,
                         drafts=drafts)
            one.run(prompts, 16)
            for chance in (-1.0, 0.0, 0.7, 1.0) if drafts else (None,):     # -1: what is the answer?
                dice.chance, rates, before = chance or 0.0, [], one.rank.stats()
                for _ in range(1 if chance == -1.0 else 3):
                    began = time.perf_counter()
                    ran = one.run(prompts, args.new)
                    took = time.perf_counter() - began - max(ran.first_s.values())
                    rates.append(rows * (args.new - 1) / took)
                if chance == -1.0:
                    dice.answers = dict(zip(map(tuple, prompts), ran.tokens.values(), strict=True))
                    continue
                right, asked = (sum(v - before.get(k, 0) for k, v in one.rank.stats().items() if k.startswith(
                    f"spec_{name}_tokens")) for name in ("accepted", "draft"))
                told.append({"rows": rows, "drafts": drafts, "chance": chance, "tokens_per_s": spread(rates),
                             "accepted": right, "drafted": asked})
                write("drafts", args.out, told)
            del one
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
