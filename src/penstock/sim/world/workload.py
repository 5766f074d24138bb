"""The requests of a scenario, and what each must produce. Knows the fake model, not the core.

The mix is chosen for what it reaches: shared prefixes, prompts that extend earlier answers, one
prompt in two namespaces, forks, prompts that end on a page edge, stop ids that count only late,
requests that can never fit.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from penstock.core.plan import NAME_BITS, Arrived, Outcome, RequestId
from penstock.sim.ranks.model import oracle
from penstock.sim.world.scenario import Scenario
from penstock.sim.world.view import capacity


@dataclass(slots=True)
class Expect:
    """One request: what was asked, what any correct engine answers, what arrived so far."""

    arrived: Arrived
    seed: int
    at: float
    truth: tuple[int, ...]                 # cut at its stop token, max_new or what can ever fit
    outcome: Outcome                       # if nothing touches it
    cut: bool                              # whether what can ever fit was less than max_new
    got: list[int] = field(default_factory=list)
    finished: Outcome | None = None
    sent: bool = False                     # Arrived was delivered
    cached: int = -1                       # tokens that Started said were cached
    planned: bool = False                  # a plan had a row of it
    expired: bool = False                  # its queue deadline was delivered before it started
    aborted: bool = False                  # an Aborted was delivered before it finished
    stop_at: int = 0                       # count of the Stopped that was delivered; 0 is none



def session_number(n: int) -> int:
    """Sessions 1, 3, 5 and so on are of one tenant, the others of another."""
    return n % 2 << NAME_BITS | n if n else 0


class Workload:
    """Makes requests; deterministic in the scenario's seed and the order of calls."""

    def __init__(self, sc: Scenario) -> None:
        self.sc = sc
        self.rng = Random(f"workload {sc.seed}")
        self._sessions_rng = Random(f"whose {sc.seed}")
        size = sc.cfg.page_size
        self.bases = [self._tokens(self.rng.randrange(max(1, sc.prompt_max - 1)))
                      for _ in range(3)]
        self.bases += [base[:len(base) // size * size] for base in self.bases]
        self.made: list[Expect] = []
        self.most = {selects: capacity.largest(sc.cfg, selects and sc.cfg.sparse)
                     for selects in (False, True)}       # positions that a request alone can have
        self.reaches = [group.reach for group in sc.cfg.groups]

    def _tokens(self, n: int) -> tuple[int, ...]:
        return tuple(self.rng.randrange(50_000) for _ in range(n))

    def initial(self) -> list[Expect]:
        """The requests that do not depend on what happens, in order of arrival."""
        rng = self.rng
        first: list[Expect] = []
        while len(first) < self.sc.requests:
            at = rng.random() * self.sc.span
            prompt, namespace = self._prompt()
            e = self._make(at, prompt, namespace=namespace)
            first.append(e)
            if rng.random() < 0.2:
                late = rng.choice((0.0, 0.0, 5.0))
                for _ in range(rng.randint(1, 3)):
                    first.append(self._make(at + late, e.arrived.prompt, fork=e.arrived))
        return sorted(first, key=lambda e: e.at)

    def next_turn(self, before: Expect, now: float) -> Expect | None:
        """A prompt that extends an answer, sometimes."""
        if self.rng.random() >= self.sc.turns or len(self.made) > 3 * self.sc.requests:
            return None
        prompt = before.arrived.prompt + tuple(before.got) + self._tokens(self.rng.randint(0, 3))
        if len(prompt) >= self.most[before.arrived.selects] and self.rng.random() < 0.8:
            return None                                       # would only be refused
        late = self.rng.random() * self.rng.choice((4, 80))
        return self._make(now + late, prompt, namespace=before.arrived.namespace, session=before.arrived.session)

    # ---------------------------------------------------------------- one request
    def _prompt(self) -> tuple[tuple[int, ...], int | None]:
        """Tokens, and their namespace if they are to be found there."""
        rng, size = self.rng, self.sc.cfg.page_size
        kind = rng.random()
        if kind < 0.04:                                       # can never fit, at least on the device
            return self._tokens(self.most[False] + rng.randint(1, 2 * size)), None
        if kind < 0.08:                                       # fits exactly, or just
            return self._tokens(max(1, self.most[rng.random() < 0.5] - rng.randint(0, 2))), None
        again = 0.5 if self.sc.alike else self.sc.again
        if kind < 0.08 + again and self.made:                 # extends an answer not yet given
            e = rng.choice(self.made)
            if len(e.arrived.prompt) <= 2 * self.sc.prompt_max:
                namespace = e.arrived.namespace if rng.random() < 0.8 else None
                if self.sc.alike:                                # ends in the page where the answer begins
                    return e.arrived.prompt + e.truth[:rng.randint(0, size)], namespace
                cut = rng.randint(0, len(e.truth))
                return e.arrived.prompt + e.truth[:cut] + self._tokens(rng.randint(0, 2)), namespace
        base = rng.choice(self.bases) if rng.random() < 0.7 else ()
        prompt = base + self._tokens(rng.randint(0, max(1, self.sc.prompt_max - len(base))))
        if rng.random() < 0.25:                               # ends on a page edge
            prompt = prompt[:len(prompt) // size * size]
        return prompt or self._tokens(1), None

    def _transfer(self) -> int:
        """What names a request to both engines of a pair; some have one engine only."""
        share = 0.6 if self.sc.cfg.disk_pages else 0.9       # those that fetch for one engine are rare
        paired = self.sc.cfg.role != "unified" and self.rng.random() < share
        return len(self.made) + 1 if paired else 0

    def _selection(self, fork: Arrived | None) -> tuple[bool, int]:
        """Whether a request may go hosted, and whether its decode computes something of its own."""
        if not self.sc.cfg.sparse:
            return False, 0
        if fork is not None:
            return fork.selects, fork.attention
        selects = self.rng.random() < (0.8 if self.sc.again < 0.9 else 0.5)
        return selects, self.rng.choice((1,) if self.sc.alike else (0, 0, 1, 2)) if selects else 0

    def _session(self, fork: Arrived | None) -> int:
        return fork.session if fork is not None else session_number(self._sessions_rng.randint(0, self.sc.sessions))

    def _retains(self) -> bool:
        return self.sc.retains > 0 and self._sessions_rng.random() < self.sc.retains

    def _make(self, at: float, prompt: tuple[int, ...], *, fork: Arrived | None = None,
              namespace: int | None = None, session: int = 0) -> Expect:
        rng = self.rng
        if namespace is None:
            namespace = fork.namespace if fork is not None else rng.choice((0, 0, 0, 1))
        max_new = 1 if rng.random() < 0.1 else rng.randint(1, self.sc.new_max)
        seed = rng.randrange(1 << 30)
        seed = seed & ~7 if self.sc.alike else seed | 1
        # The last output token needs no KV, hence one more than the pool holds.
        selects, attention = self._selection(fork)
        fits = min(max_new, min(self.sc.cfg.max_len, self.most[selects] + 1) - len(prompt))
        truth = oracle(prompt, fits, namespace, seed, attention, self.reaches) if fits > 0 else ()
        outcome = Outcome.LENGTH if fits > 0 else Outcome.REFUSED
        stop, min_new = frozenset[int](), rng.randint(0, max_new) if rng.random() < 0.3 else 0
        if truth and rng.random() < (0.1 if self.sc.alike else 0.5):
            stop = frozenset(rng.sample(truth, min(len(truth), rng.randint(1, 2))))
            ends = [i for i, t in enumerate(truth) if t in stop and i >= min_new]
            if ends:
                truth, outcome = truth[:ends[0] + 1], Outcome.STOP
        priority = rng.choice((0, 0, 0, 1, 2))
        rng.random()                       # means nothing: without it every seed would be another workload
        e = Expect(Arrived(RequestId(len(self.made)), prompt, max_new, stop, min_new, namespace, priority,
                           fork.rid if fork is not None else None, selects, attention, self._transfer(),
                           drafts=(None, None, 0, 1)[seed >> 4 & 3],        # no dice: see above
                           session=session or self._session(fork), retains=self._retains()),
                   seed, at, truth, outcome, fits < max_new)
        self.made.append(e)
        return e
