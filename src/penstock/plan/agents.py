"""Traces of coding agents: sessions whose context grows turn by turn, with a pause for each tool.

The defaults are of published agent traces: 43 turns, from 24,000 to 265,000 tokens of context, 444 tokens an answer,
8 s for a tool.
"""
from __future__ import annotations

from dataclasses import dataclass
from random import Random

from penstock.plan.trace import Session, Span, Trace, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Agents:
    """Lengths in tokens, as they are before `scale` divides them.

    All sessions begin with the same `shared` tokens. Tool pauses are exponential with mean `pause_s`. `one_shots`
    prompts of `one_shot_tokens` tokens, which nothing repeats, arrive at random within the time of a session's tools.
    """

    sessions: int = 12
    turns: int = 43
    first: int = 24_000
    last: int = 265_000
    output: int = 444
    shared: int = 8_000
    pause_s: float = 8.0
    one_shots: int = 0
    one_shot_tokens: int = 32_000
    seed: int = 0


def agents(a: Agents, scale: float = 1.0) -> Trace:
    """Return the trace: `a.sessions` sessions, and one of a single turn for each one-shot prompt."""
    rng = Random(a.seed)

    def tokens(n: float) -> int:
        return max(1, round(n / scale))

    grows = (a.last - a.first) / max(1, a.turns - 1) - a.output     # on average, with each result of a tool
    made = []
    for s in range(a.sessions):
        begin = Span("shared", tokens(a.shared)), Span(f"task {s}", tokens(a.first - a.shared))
        turns = [Turn(begin, tokens(a.output))]
        for t in range(1, a.turns):
            turns.append(Turn((Span(f"result {s} {t}", tokens(grows * rng.uniform(0.5, 1.5))),), tokens(a.output),
                              rng.expovariate(1 / a.pause_s) if a.pause_s else 0.0, continues=True))
        made.append(Session(rng.uniform(0, 2 * a.pause_s), tuple(turns)))
    if a.one_shots:
        each_s = a.turns * a.pause_s / a.one_shots
        at = rng.uniform(0, 2 * a.pause_s)
        for n in range(a.one_shots):
            at += rng.expovariate(1 / each_s) if each_s else 0.0
            made.append(Session(at, (Turn((Span(f"one-shot {n}", tokens(a.one_shot_tokens)),), tokens(a.output)),)))
    extra = f", {a.one_shots} one-shot prompts" if a.one_shots else ""
    return Trace(f"{a.sessions} agents of {a.turns} turns{extra}", tuple(made))
