"""How long a step takes: its weights, the prompt tokens, and what decoding requests read."""
from __future__ import annotations

from penstock.core.core import Core
from penstock.core.plan import HotUse, RequestId, StepPlan
from penstock.core.settings import CoreConfig
from penstock.plan.rates import Rates
from penstock.plan.shape import Shape, kv_read

USE_STEPS = 16          # from one report of hot buffers to the next


class StepTime:
    """`seconds` of each step of one engine, whose planner says where requests have their pages."""

    def __init__(self, core: Core, shape: Shape, rates: Rates, scale: float = 1.0) -> None:
        """scale: lengths are divided by this, so what each token takes is multiplied by it."""
        self.core, self.shape, self.rates, self.scale = core, shape, rates, scale
        self.begun = 0                  # cached tokens of requests that have begun since the last step
        self._missing: dict[RequestId, float] = {}      # tokens that a step misses, of requests with host pages
        self._used = 0                                  # step of the last report of hot buffers
        self._token_bytes = sum(g.page_bytes for g in core.cfg.groups if g.hosted) / core.cfg.page_size
        self._budget = core.cfg.budget or core.cfg.hot_pages * core.cfg.page_size

    def seconds(self, plan: StepPlan) -> float:
        """How long the step takes, without loads that it waits for."""
        cfg, rates, scale, core = self.core.cfg, self.rates, self.scale, self.core
        flops = read = missed = 0.0
        each_us, self.begun = rates.cached_us * self.begun, 0
        at = tokens = 0
        for rid, start, count in zip(plan.rids, plan.start, plan.count, strict=True):
            if plan.tokens[at] >= 0:
                flops += self.shape.prompt_flops(start * scale, count * scale)
                read += kv_read(cfg.groups, cfg.page_size, start, 0)
            else:
                r = core.live.get(rid)
                # A request that may decode from host memory selects; the others read all.
                read += kv_read(cfg.groups, cfg.page_size, start + count, self._selected(r is not None and r.may_host))
                each_us += rates.request_us
                if r is not None and r.place.on_host:
                    each_us += rates.selecting_us
                    missed += self._missing.get(rid, 0.0)
            at += count
            tokens += count
        if not plan.rows:
            return 0.0
        fixed = (rates.step_us + each_us) / 1e6 + self.shape.weights_read(tokens) / rates.weights_bytes_s
        return (fixed * scale + flops / rates.prompt_flops_s + scale * read / rates.kv_bytes_s
                + scale * missed * self._token_bytes / rates.miss_bytes_s)

    def _selected(self, selects: bool) -> int:
        return self._budget if selects else 0

    def hot_use(self, plan: StepPlan) -> HotUse | None:
        """What hot buffers have missed, when a report of it is due."""
        if not self.core.hosted or plan.step < self._used + USE_STEPS:
            return None
        self._used, self._missing, rows = int(plan.step), {}, []
        for r in self.core.hosted:
            for t in r.tables:
                if t.hosted and t.device:
                    lacks = t.device.count(None) / len(t.device)
                    grown = max(1.0, len(t.hot) / max(1, r.hot.least))
                    selected = min(self._budget, r.num_tokens)
                    self._missing[r.rid] = selected * self.rates.miss_share * lacks / grown
                    rows.append((r.rid, selected, int(self._missing[r.rid])))
                    break
        return HotUse(plan.step, tuple(rows)) if rows else None


def transfer_bytes(cfg: CoreConfig, group: int, tokens: int) -> float:
    """Bytes of so many tokens of a move, whose last page may be partial."""
    g = cfg.groups[group]
    return g.page_bytes * tokens / (g.page_tokens or cfg.page_size)
