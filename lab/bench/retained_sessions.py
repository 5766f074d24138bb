"""29 November 2026: retained sessions in the table of twelve agents (bench/agents.py), as patches of the planner.

    PYTHONPATH=src:bench python -P lab/bench/retained_sessions.py [SEEDS]

`ended`: each one-shot prompt is a session that ends with its answer. `retained`: pages of the first N sessions, and the
prompt that all begin with, are evicted after all others. `share`: all sessions ask for that, and are retained in the
order in which they came while the pages of all of them together are at most this share of the host tier.
docs/design/adr/0096 has what came out.
"""
from __future__ import annotations

import sys
from itertools import count
from statistics import median

import agents

from penstock.core import state
from penstock.core.kv import prefix_tree
from penstock.core.plan import Arrived, Outcome
from penstock.core.policy.sessions import SHARED, Session, claim
from penstock.core.request import Request
from penstock.plan.world import World as Planned

BOOST, BEGIN_PAGES, ONE_SHOT = 1 << 50, 20, 1_000


class Policy:
    ended, retained, share = False, 0, 0.0
    kept: set[Session] = set()                  # noqa: RUF012
    pages: dict[Session, int] = {}              # noqa: RUF012  # in the order in which they came


def unref(tree, path, user=None):
    tree._clock += 1
    any_kept = Policy.retained or Policy.share
    for node in reversed(path):
        node.refs -= 1
        if user is not None and (node.session is not user or node is path[-1]):
            claim(node, user, is_end=node is path[-1])
        if not node.refs:
            owner = node.session
            late = owner in Policy.kept or (owner is SHARED and any_kept and node.depth <= BEGIN_PAGES)
            over = owner is not None and owner.ended
            node.last_used = tree.flushed + 1 if over else tree._clock + BOOST * bool(late)
        tree.update_evictable(node)


def end(core: state.CoreState, r: Request, outcome: Outcome, real=state.CoreState.end) -> None:
    real(core, r, outcome)
    if r.arrived.session > ONE_SHOT:
        if Policy.ended:
            core.sessions.end(r.arrived.session)
        return
    if r.arrived.session <= Policy.retained:
        Policy.kept.add(r.session)
    if not Policy.share:
        return
    Policy.pages[r.session] = r.num_tokens // core.cfg.page_size
    total, now = 0, set()
    for session, pages in Policy.pages.items():
        if total + pages <= Policy.share * core.cfg.dram_pages:
            total += pages
            now.add(session)
    for session in Policy.kept - now:           # it has outgrown the share: its pages are as others
        for page in list(session.ends):
            while page.session is session:
                if not page.refs and page.last_used >= BOOST:
                    page.last_used -= BOOST
                    core.kv.tree.update_evictable(page)
                page = page.parent
    Policy.kept = now


class World(Planned):
    """Requests have sessions: those of an agent one, each one-shot prompt its own."""

    shots = count(ONE_SHOT + 1)

    def _arrive(self, client, turn):
        engine = self._engines[0]
        real = engine.send

        def send(event):
            if isinstance(event, Arrived):
                number = int(client.name) + 1
                session = number if number <= 12 else next(self.shots)
                event = Arrived(event.rid, event.prompt, event.max_new, selects=event.selects, session=session)
            real(event)

        engine.send = send
        try:
            super()._arrive(client, turn)
        finally:
            engine.send = real


def main() -> None:
    prefix_tree.Tree.unref, state.CoreState.end, agents.World = unref, end, World
    for name, ended, retained, share in (
            ("LRU", False, 0, 0), ("one-shot prompts end", True, 0, 0), ("2 retained", False, 2, 0),
            ("4 retained", False, 4, 0), ("6 retained", False, 6, 0), ("8 retained", False, 8, 0),
            ("share .5", False, 0, .5), ("share .7", False, 0, .7), ("share .9", False, 0, .9)):
        hits, late = [], []
        for seed in range(int(sys.argv[1]) if len(sys.argv) > 1 else 3):
            Policy.ended, Policy.retained, Policy.share, Policy.kept, Policy.pages = ended, retained, share, set(), {}
            got = agents.row(2_000_000, 60, False, scale=8, seed=seed, rates=agents.machine(10, 15_000))
            found = got.device_tokens + got.host_tokens
            hits.append(found / got.prompt_tokens / got.largest_hits)
            late.append(sorted(got.ttft_s)[int(len(got.ttft_s) * .95)])
        print(f"{name:22} {' '.join(f'{h:.2f}' for h in hits)}  TTFT p95 {median(late):.0f} s", flush=True)


if __name__ == "__main__":
    main()
