"""Pages of MLA entries selected by bounds, once for all heads: which needles are found, and what softmax mass is read.

    PYTHONPATH=src python lab/recall/latent_bounds.py recall [--seeds 4]       # tests/data/recall without its indexer
    PYTHONPATH=src python lab/recall/latent_bounds.py made [--seeds 4]         # made entries of 512 + 64, 64 heads

The prompt is dense. A query of a question reads the first 16 tokens, its last 32 and, up to its budget, the pages of
the largest score. A score is of the absorbed query q W_UK with its rotated part, and of entries with the rotated key.

    Q queries   N heads   E values of an entry   S entries   U pages   G entries of a page   T tokens   D width
"""
from __future__ import annotations

import argparse
import random
import statistics
from functools import cached_property
from pathlib import Path

import data
import net
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

SINK, WINDOW, CONTEXT, QUESTIONS = 16, 32, 4096, 32
MOST, LEAST = 0.75, 0.25                # as penstock.kernels.choose.select.spec, ADR 0042
FRACTIONS = 4, 8, 16
NAMES = ["bounds, sum", "bounds, max", "bounds, shares", "our score, sum", "our score, max", "our score, shares",
         "mean keys, sum", "mean keys, max", "mean keys, shares", "mean + 2 sd, shares", "oracle, best key, max",
         "oracle, mass", "any"]


def over_heads(score_QNU: Tensor, how: str) -> Tensor:
    """[Q, U]; "shares": each head's softmax over pages, summed."""
    if how == "shares":         # of softmax over pages in each head
        return score_QNU.softmax(-1).sum(1)
    return score_QNU.sum(1) if how == "sum" else score_QNU.amax(1)


class Scores:
    """[Q, U] of a choice, of the full pages of size `page`; q is scaled. Products are kept for the next choice."""

    def __init__(self, q_QNE: Tensor, entry_SE: Tensor, position_Q: Tensor, page: int) -> None:
        full = len(entry_SE) // page * page
        self.q_QNE, self.entry_SE = q_QNE, entry_SE[:full]
        self.unit_UGE = self.entry_SE.view(-1, page, entry_SE.shape[1])
        self.later_QU = torch.arange(page - 1, full, page) > position_Q[:, None]

    @cached_property
    def bounds(self) -> tuple[Tensor, Tensor]:
        """The most and the least [Q, N, U] that q k can be."""
        low_EU, high_EU = self.unit_UGE.amin(1).T, self.unit_UGE.amax(1).T
        up, down = self.q_QNE.clamp_min(0), self.q_QNE.clamp_max(0)
        return up @ high_EU + down @ low_EU, up @ low_EU + down @ high_EU

    @cached_property
    def mean(self) -> Tensor:
        return self.q_QNE @ self.unit_UGE.mean(1).T

    @cached_property
    def exact(self) -> Tensor:
        """[Q, N, U, G]."""
        return (self.q_QNE @ self.entry_SE.T).unflatten(-1, (-1, self.unit_UGE.shape[1]))

    def of(self, name: str) -> Tensor:
        if name == "any":
            generator = torch.Generator().manual_seed(len(self.entry_SE))
            return torch.rand(len(self.q_QNE), len(self.unit_UGE), generator=generator)
        if name == "oracle, mass":
            return self.exact.logsumexp(-1).masked_fill(self.later_QU[:, None], -torch.inf).softmax(-1).sum(1)
        what, _, how = name.rpartition(", ")
        if what == "mean keys":
            score = self.mean
        elif what == "mean + 2 sd":
            score = self.mean + 2 * (self.q_QNE.square() @ self.unit_UGE.var(1, correction=0).T).sqrt()
        elif what == "oracle, best key":
            score = self.exact.amax(-1)
        else:
            most, least = self.bounds
            score = most if what == "bounds" else MOST * most + LEAST * least
        return over_heads(score.masked_fill(self.later_QU[:, None], -torch.inf), how)


def kept(score_QU: Tensor, position_Q: Tensor, entries: int, page: int, budget: int) -> Tensor:
    """bool [Q, S]: what is read, as `SelectRule` and `select` have it; budget in tokens."""
    units, count = torch.arange(-(-entries // page)), budget // page
    end_Q1 = ((position_Q + 1 - WINDOW) // page)[:, None]
    first = -(-SINK // page)
    always_QU = (units < first) | (units >= end_Q1) & (units <= (position_Q // page)[:, None])
    scored_QU = (units >= first) & (units < end_Q1)
    score_QU = F.pad(score_QU, (0, len(units) - score_QU.shape[1])).masked_fill(~scored_QU, -torch.inf)
    rank_QU = score_QU.argsort(dim=-1, descending=True, stable=True).argsort(-1)
    chosen_QU = always_QU | scored_QU & (rank_QU < count - always_QU.sum(-1, keepdim=True))
    return chosen_QU.repeat_interleave(page, -1)[:, :entries] & (torch.arange(entries) <= position_Q[:, None])


class Latent:
    """The recall model as dense MLA, in float32: a context once, then questions under any choice."""

    def __init__(self, folder: str, pages: list[int], names: list[str]) -> None:
        self.model = net.Recall()
        weights = {name: part.float() for name, part in load_file(Path(folder) / "model.safetensors").items()}
        self.model.load_state_dict({name: weights[name] for name in self.model.state_dict()})
        self.pages, self.names, self.mass = pages, names, dict[tuple, list[Tensor]]()

    def attend(self, layer: int, x_TD: Tensor, known_SE: Tensor | None, choice: tuple | None, watched: bool) -> tuple:
        """(output, entries so far) of rows x, which follow what is known; choice: (name, page, budget)."""
        a = self.model.model["layers"][layer].self_attn
        start, rope_dim = 0 if known_SE is None else len(known_SE), net.ROPE
        cos, sin = net.angles(start + len(x_TD), x_TD.device)
        rope = cos[start:], sin[start:]
        q = a.q_b_proj(a.q_a_layernorm(a.q_a_proj(x_TD))).unflatten(-1, (net.N, net.NOPE + rope_dim))
        up_NOL = a.kv_b_proj.weight.unflatten(0, (net.N, 2 * net.NOPE))
        absorbed = torch.einsum("qno,nol->qnl", q[..., :net.NOPE], up_NOL[:, :net.NOPE])
        turned = net.turned(q[..., net.NOPE:].transpose(0, 1), rope, True).transpose(0, 1)
        q_QNE = torch.cat([absorbed, turned], -1) * (net.NOPE + rope_dim) ** -0.5
        both = a.kv_a_proj_with_mqa(x_TD)
        entry = torch.cat([a.kv_a_layernorm(both[:, :net.LATENT]), net.turned(both[:, net.LATENT:], rope, True)], -1)
        entry_SE = entry if known_SE is None else torch.cat([known_SE, entry])
        position_Q = torch.arange(start, len(entry_SE))
        visible_QS = torch.arange(len(entry_SE)) <= position_Q[:, None]
        if choice:
            name, page, budget = choice
            keep_QS = kept(Scores(q_QNE, entry_SE, position_Q, page).of(name), position_Q, len(entry_SE), page, budget)
        else:
            keep_QS = visible_QS
        score_QNS = (q_QNE @ entry_SE.T).masked_fill_(~keep_QS[:, None], -torch.inf)
        share_QNS = score_QNS.softmax(-1)
        if watched:
            for page in self.pages:
                scores = Scores(q_QNE, entry_SE, position_Q, page)
                for name in self.names:
                    found = scores.of(name)
                    for part in FRACTIONS:
                        mask = kept(found, position_Q, len(entry_SE), page, CONTEXT // part)
                        mass_QN = (share_QNS * mask[:, None]).sum(-1)
                        self.mass.setdefault((name, page, part), []).append(mass_QN)
        out = torch.einsum("qnl,nol->qno", share_QNS @ entry_SE[:, :net.LATENT], up_NOL[:, net.NOPE:])
        return a.o_proj(out.flatten(1)), entry_SE

    def run(self, ids_T: Tensor, known: list[Tensor] | None, choice: tuple | None = None, watched: bool = False):
        """(logits, entries of each layer) of tokens after what is known."""
        x, entries = self.model.model["embed_tokens"](ids_T), []
        for i, block in enumerate(self.model.model["layers"]):
            y, found = self.attend(i, block.input_layernorm(x), known and known[i], choice, watched)
            x = x + y
            x = x + block.mlp(block.post_attention_layernorm(x))
            entries.append(found)
        return self.model.lm_head(self.model.model["norm"](x)), entries

    def context(self, ids_T: Tensor) -> list[Tensor]:
        entries: list[Tensor] | None = None
        for part in ids_T.split(256):
            entries = self.run(part, entries)[1]
        return entries


def recall(folder: str, seeds: range, pages: list[int], names: list[str]) -> None:
    """Questions right, each with all its tokens, and mass; 32 questions a context, none asked twice."""
    latent, right = Latent(folder, pages, names), dict[tuple, list[bool]]()
    tasks = {"32 needles": ("recall", 1, 32), "512 pairs": ("recall", 1, 512), "chains of 4": ("chain", 4, 512),
             "sums of 4": ("sum", 1, 256)}
    width = {"recall": 3, "chain": 6, "sum": 9}
    for seed in seeds:
        for task, (kind, hops, n) in tasks.items():
            gen = torch.Generator().manual_seed(100 * seed + n)
            ids, labels = data.pairs(1, CONTEXT * 8 // 7, gen, random.Random(seed), kind, spread=True, hops=hops, n=n)
            start = int((ids[0] == data.words.BAR).nonzero()[0]) + 1
            known = latent.context(ids[0, :start])
            asked = slice(start, start + QUESTIONS * width[kind])
            # The last label belongs to the next question.
            want = labels[0, asked]
            choices = [None, *((name, page, CONTEXT // part) for page in pages for part in FRACTIONS
                               for name in names)]
            for choice in choices:
                logits, _ = latent.run(ids[0, asked], known, choice, watched=choice is None)
                good = (logits.argmax(-1) == want) | (want == data.IGNORED)
                right.setdefault((task, choice), []).extend(good.view(QUESTIONS, -1).all(1).tolist())
            print("#", seed, task, sum(right[task, None]), "of", len(right[task, None]), flush=True)
    print("choice                    page  of   " + "  ".join(f"{t:>12}" for t in tasks) + "   mass  worst head")
    for page in pages:
        for part in FRACTIONS:
            for name in names:
                choice = name, page, CONTEXT // part
                cells = [f"{100 * statistics.fmean(right[task, choice]):12.1f}" for task in tasks]
                mass_QN = torch.cat(latent.mass[name, page, part])
                print(f"{name:24}  {page:4}  1/{part:<3}" + "  ".join(cells) +
                      f"  {mass_QN.mean():.3f}  {mass_QN.amin(1).mean():.3f}", flush=True)


class Made:
    """Entries of channels of unequal size, with topics that last 100 tokens and are half of their variance, or none."""

    entries, heads, latent, rope, dim, seeking = 8192, 64, 512, 64, 128, 8

    def __init__(self, seed: int, topics: bool) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        segment_S = (torch.rand(self.entries, generator=self.generator) < 1 / 100).cumsum(0)
        part, own = (0.5, 0.5) if topics else (0.0, 1.0)
        entry_SL = part ** 0.5 * self.draw(int(segment_S[-1]) + 1, self.latent)[segment_S]
        entry_SL = F.normalize(entry_SL + own ** 0.5 * self.draw(self.entries, self.latent), dim=1)
        self.entry_SL = entry_SL * self.latent ** 0.5 * (0.5 * self.draw(self.latent)).exp()
        self.up_NOL = self.draw(self.heads, self.dim, self.latent) * self.latent ** -0.5
        net.ROPE, self.base = self.rope, self.draw(self.rope)
        self.cos, self.sin = net.angles(self.entries + 1, torch.device("cpu"))
        self.key_SR = net.turned(self.base + self.draw(self.entries, self.rope), (self.cos[:-1], self.sin[:-1]), True)
        self.needle_M = torch.randperm(self.entries - 128, generator=self.generator)[:QUESTIONS] + 64

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def queries(self, needles: int) -> tuple[Tensor, Tensor, Tensor]:
        """(without rotation [Q, N, L], the rotated part [Q, N, R], needles [Q, 8]): 8 of 64 heads seek 1 needle, or 4
        two heads each, which has 12 nats; others have scores of about 2 nats, and like near tokens if rotated."""
        seeks_N = torch.arange(self.heads) < self.seeking
        turn = torch.arange(self.heads) % needles * 8
        aim_QN = self.needle_M[(torch.arange(QUESTIONS)[:, None] + turn) % QUESTIONS]
        key_QNO = torch.einsum("nol,qnl->qno", self.up_NOL, self.entry_SL[aim_QN])
        other_QNO = 2 * self.draw(QUESTIONS, self.heads, self.dim) / key_QNO.norm(dim=-1, keepdim=True)
        q_QNO = torch.where(seeks_N[:, None], key_QNO * 12 / key_QNO.square().sum(-1, keepdim=True), other_QNO)
        rotated = torch.where(seeks_N[:, None], 0.0, self.base) + self.draw(QUESTIONS, self.heads, self.rope)
        rotated = net.turned(rotated, (self.cos[-1], self.sin[-1]), True) * self.rope ** -0.5
        return torch.einsum("qno,nol->qnl", q_QNO, self.up_NOL), rotated, aim_QN[:, :self.seeking]


def made(seeds: range, pages: list[int], names: list[str]) -> None:
    right, mass = dict[tuple, list[bool]](), dict[tuple, list[Tensor]]()
    cases = [(topics, rotated, needles) for topics in (True, False) for rotated in (False, True) for needles in (1, 4)]
    for seed in seeds:
        for topics, rotated, needles in cases:
            kv = Made(seed, topics)
            q_QNE, turned_QNR, aim_QN = kv.queries(needles)
            entry_SE = kv.entry_SL
            if rotated:
                q_QNE, entry_SE = torch.cat([q_QNE, turned_QNR], -1), torch.cat([entry_SE, kv.key_SR], -1)
            share_QNS = (q_QNE @ entry_SE.T).softmax(-1)
            position_Q = torch.full((QUESTIONS,), kv.entries - 1)
            for page in pages:
                scores = Scores(q_QNE, entry_SE, position_Q, page)
                for name, part in ((name, part) for name in names for part in FRACTIONS):
                    mask = kept(scores.of(name), position_Q, kv.entries, page, kv.entries // part)
                    got_QN = torch.einsum("qns,qs->qn", share_QNS, mask.float())
                    key = topics, rotated, needles, page, part, name
                    right.setdefault(key, []).extend(mask.gather(1, aim_QN).all(1).tolist())
                    mass.setdefault(key, []).append(torch.stack([got_QN.mean(), got_QN[:, :kv.seeking].mean()]))
        print("#", seed, flush=True)
    print("% of questions whose needles are all read, mass of heads, mass of heads that seek")
    print(" " * 36 + "  ".join(f"{'topics' if t else 'none':6} {'rope' if r else '-':4} {n}    " for t, r, n in cases))
    for page, part, name in ((page, part, name) for page in pages for part in FRACTIONS for name in names):
        cells = []
        for key in ((*case, page, part, name) for case in cases):
            all_of, seeking = torch.stack(mass[key]).mean(0)
            cells.append(f"{100 * statistics.fmean(right[key]):5.1f} {all_of:.2f} {seeking:.2f}")
        print(f"{name:24}  {page:3} 1/{part:<3}  " + "  ".join(cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("recall", "made"))
    parser.add_argument("--folder", default="tests/data/recall")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--first", type=int, default=0, help="seed")
    parser.add_argument("--pages", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--choices", nargs="+", default=NAMES)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with torch.no_grad():
        seeds = range(args.first, args.first + args.seeds)
        if args.what == "recall":
            recall(args.folder, seeds, args.pages, args.choices)
        else:
            made(seeds, args.pages, args.choices)


if __name__ == "__main__":
    main()
