"""Batches that the recall model is trained on: made on the device, from a generator, none of them twice.

`B` rows, `T` tokens. A batch is (ids_BT, labels_BT): the label of a position is the token that follows,
and IGNORED wherever that token cannot be known. Pairs `a b` stand in a context, with filler between them or
without; questions about them follow, each with its answer:

    recall a b           the value of key a
    chain a b c ...      the value of a is a key, whose value is ...
    sum a x b y ...      the digits of a, b, ... added up, modulo 10
"""

import random

import torch
from torch import Tensor

from penstock.eval import words

IGNORED = -100
MAX_PAIRS = 512
SUM_STEPS = 4


def generator(seed: int, number: int, device: str) -> tuple[torch.Generator, random.Random]:
    """Random sources of one batch, the same whenever it is made."""
    mixed = seed * 1_000_003 + number
    return torch.Generator(device).manual_seed(mixed), random.Random(mixed)


def _order(rows: int, n: int, gen: torch.Generator) -> Tensor:
    """A permutation of n in each row."""
    return torch.rand(rows, n, device=gen.device, generator=gen).argsort(1)


def _randint(low: int, high: int, shape: tuple[int, ...], gen: torch.Generator) -> Tensor:
    return torch.randint(low, high, shape, device=gen.device, generator=gen)


def _labels(ids_BT: Tensor, answer_T: Tensor) -> Tensor:
    """The next token where it is an answer."""
    labels = torch.full_like(ids_BT, IGNORED)
    labels[:, :-1] = torch.where(answer_T[1:], ids_BT[:, 1:], labels[:, 1:])
    return labels


def _ask(kind: str, hops: int, keys: Tensor, values: Tensor, count: int, gen: torch.Generator) -> Tensor:
    """[B, count, words of a question] questions; none is asked twice before all have been."""
    rows, n = keys.shape
    if kind == "sum":
        who = _randint(0, n, (rows, count * SUM_STEPS), gen)
        digits = (values.gather(1, who) - words.DIGIT).view(rows, count, SUM_STEPS)
        totals = digits.cumsum(-1) % 10 + words.DIGIT
        steps = torch.stack([keys.gather(1, who).view(rows, count, SUM_STEPS), totals], -1).flatten(2)
        return torch.cat([torch.full_like(steps[..., :1], words.SUM), steps], -1)
    starts = n // hops
    who = _order(rows, starts, gen).repeat(1, count // starts + 1)[:, :count]
    answers = [values.gather(1, who + hop * starts) for hop in range(hops)]
    mark = torch.full_like(who, words.CHAIN if kind == "chain" else words.RECALL)
    return torch.stack([mark, keys.gather(1, who), *answers], -1)


def pairs(
    rows: int,
    tokens: int,
    gen: torch.Generator,
    dice: random.Random,
    kind: str,
    *,
    spread: bool,
    hops: int = 1,
    n: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Questions of one kind ("recall", "chain", "sum") about n pairs (None: as many as there is room for);
    `spread` over most of the context (None: a random number of them).

    Reads gen and dice. Returns ids_BT and labels_BT, int64, on gen's device.
    """
    most = min(tokens // 4, MAX_PAIRS)
    if n is None:
        n = dice.randint(max(8, most // 8), most) if spread else most
    n -= n % hops
    slots = (7 * tokens // 8) // 2 if spread else n
    everyone = _order(rows, words.NUM_KEYS, gen)
    keys = everyone[:, :n] + words.KEY
    if kind == "chain":  # a -> b -> c: the value of a key is the key n / hops places further
        values = everyone[:, n // hops : n + n // hops] + words.KEY
    elif kind == "sum":
        values = _randint(words.DIGIT, words.DIGIT + 10, (rows, n), gen)
    else:
        values = _randint(words.VALUE, words.VALUE + words.NUM_VALUES, (rows, n), gen)
    where = _order(rows, slots, gen)[:, :n, None].expand(-1, -1, 2)
    filler = _randint(words.FILLER, words.FILLER + words.NUM_FILLERS, (rows, tokens), gen)
    lead = dice.randint(0, 1)
    context = filler[:, : 2 * slots].view(rows, slots, 2).scatter(1, where, torch.stack([keys, values], -1))
    width = 1 + 2 * SUM_STEPS if kind == "sum" else 2 + hops
    count = (tokens - lead - 2 * slots - 1) // width
    questions = _ask(kind, hops, keys, values, count, gen)
    ids = filler.clone()  # what is left of the row at either end stays filler
    at = lead + 2 * slots
    ids[:, lead:at] = context.flatten(1)
    ids[:, at] = words.BAR
    ids[:, at + 1 : at + 1 + count * width] = questions.flatten(1)
    one = torch.zeros(width, dtype=torch.bool, device=gen.device)
    one[2::2] = True
    if kind != "sum":
        one[2:] = True
    answer = torch.zeros(tokens, dtype=torch.bool, device=gen.device)
    answer[at + 1 : at + 1 + count * width] = one.repeat(count)
    return ids, _labels(ids, answer)


def copying(rows: int, tokens: int, gen: torch.Generator) -> tuple[Tensor, Tensor]:
    """Distinct words, then a run of them again from a random place: what makes induction heads form.

    Short ones are of keys only: of fewer words, each is seen more often.
    """
    pool = words.NUM_KEYS if tokens <= 128 else words.NUM_KEYS + words.NUM_VALUES
    n = min(tokens // 2, pool)
    source = _order(rows, pool, gen)[:, :n]
    start = _randint(0, n, (rows, 1), gen)
    run = (torch.arange(tokens - n, device=gen.device) + start) % n
    ids = torch.cat([source, source.gather(1, run)], 1)
    answer = torch.arange(tokens, device=gen.device) > n
    return ids, _labels(ids, answer)


def asked(tokens: int) -> int:
    """Pairs in a context of `penstock eval --task recall`."""
    return min(MAX_PAIRS, tokens // 6)


def recall_alone(longest: int, dice: random.Random) -> tuple[int, int, bool]:
    """Tokens (more often many), pairs, and whether they are spread, of a batch that asks for values only."""
    tokens = max(dice.choice([128 << i for i in range(10) if 128 << i <= longest]) for _ in range(2))
    most = min(tokens // 4, MAX_PAIRS)
    return tokens, dice.randint(most // 2, most), dice.random() < 0.5


def batch(rows: int, tokens: int, seed: int, number: int, device: str) -> tuple[Tensor, Tensor]:
    """Batch `number`: a third copying, the rest questions, sums from 512 tokens on."""
    gen, dice = generator(seed, number, device)
    turn = number % 12
    if turn % 3 == 0:
        return copying(rows, tokens, gen)
    if turn == 11 and tokens >= 512:
        return pairs(rows, tokens, gen, dice, "sum", spread=dice.random() < 0.5)
    spread = tokens >= 256 and dice.random() < 0.4
    if turn % 3 == 1:
        return pairs(rows, tokens, gen, dice, "recall", spread=spread)
    hops = 2 if tokens <= 128 else dice.choice((2, 2, 2, 3, 4))
    return pairs(rows, tokens, gen, dice, "chain", spread=spread, hops=hops)
