"""One token on scratch pools before an engine says that it is ready; with a selector, one from host pages."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.config.errors import ConfigError
from penstock.config.params import SamplingParams
from penstock.core.plan import (
    NO_DRAM,
    NO_HBM,
    Bind,
    DramPage,
    Group,
    HbmPage,
    Hot,
    RequestId,
    Retired,
    Row,
    StepId,
    StepPlan,
)
from penstock.exec.attend import LatentOps
from penstock.exec.caches import Caches
from penstock.exec.front import Front
from penstock.exec.rank import Rank
from penstock.exec.selecting import Selector
from penstock.kernels.paged_attention import Planner
from penstock.memory.dram import DramPool
from penstock.memory.hbm import HbmPool
from penstock.model.base import CacheShape, Model


def prove(model: Model, attention: Planner | LatentOps, caches: Caches, groups: Sequence[CacheShape],
          selector: Selector | None) -> None:
    """Produce a token: what is announced as ready has run, and first-call costs are paid.

    With hot buffers the prompt goes to a host page, and a second token reads it from there.
    Raises ConfigError if the logits are not finite.
    """
    size, hosted = caches.layouts[0].page_size, selector is not None and selector.hot_pages > 0
    device = [HbmPool(layout, 2, group=Group(g)) for g, layout in enumerate(caches.layouts)]
    host = [DramPool(layout, 2, group=Group(g)) for g, layout in enumerate(caches.layouts)] if hosted else []
    budget = selector.rule.least_units * selector.rule.unit if hosted and selector is not None else 0
    front = Front([Rank(model, attention, device, host, rows=1, max_len=2 * size, groups=groups,
                        selector=selector)])
    rid, prompt = RequestId(0), (0,) * min(size, model.max_position)
    front.open(rid, prompt, SamplingParams(temperature=0.0, top_k_tokens=budget))
    first = StepPlan(
        step=StepId(1), rows=(Row(0),), rids=(rid,), start=(0,), count=(len(prompt),), samples=(True,),
        tokens=prompt, grows=(), moves=(), binds=(_bind(rid, len(groups), hosted),))
    plans = [first]
    if hosted and len(prompt) < model.max_position:
        plans.append(replace(first, step=StepId(2), start=(len(prompt),), count=(1,), tokens=(-1,), binds=()))
    for plan in plans:
        front.submit(plan)
        [retired, *_] = front.poll(block=True)
        assert isinstance(retired, Retired)
        if retired.tokens == ((),):
            raise ConfigError("a first token cannot be produced: the model's logits are not finite. "
                              "Its weights are damaged, or overflow in this --dtype")


def _bind(rid: RequestId, groups: int, hosted: bool) -> Bind:
    """Two pages of each group on the device, or those of the first group on the host."""
    on_device = (HbmPage(0), HbmPage(1))
    if not hosted:
        return Bind(Row(0), rid, (on_device,) * groups, 0)
    others = groups - 1
    return Bind(Row(0), rid, ((NO_HBM, NO_HBM), *(on_device,) * others), 0,
                host=((DramPage(0), DramPage(1)), *((NO_DRAM, NO_DRAM),) * others),
                hot=(tuple(Hot(page) for page in on_device), *((),) * others))
