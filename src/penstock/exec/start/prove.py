"""One token on scratch pools before an engine says that it is ready; with a selector, one from host pages."""
from __future__ import annotations

from dataclasses import replace

from penstock.config.base.errors import ConfigError
from penstock.config.request.params import SamplingParams
from penstock.core.plan import (
    NO_DRAM,
    NO_HBM,
    Bind,
    DramPage,
    HbmPage,
    Hot,
    RequestId,
    Retired,
    Row,
    StepId,
    StepPlan,
)
from penstock.core.settings import CoreConfig
from penstock.exec.executor import Executor
from penstock.exec.load.layout import Caches
from penstock.exec.sparse.selectors import least_of
from penstock.model.base import Selector


def scratch(caches: Caches, hot: int) -> CoreConfig:
    """Pools of two slabs for each group, for one row with a hot buffer of so many pages."""
    size, pages = caches.page_size, 2 * len(caches.groups) * caches.slabs.slab_pages[0]
    return CoreConfig(page_size=size, rows=1, hbm_pages=pages, dram_pages=pages if hot else 0,
                      hot_pages=hot, max_len=2 * size, groups=caches.groups, group_base=1 << 20)


def prove(executor: Executor, core: CoreConfig, max_position: int, selector: Selector | None) -> None:
    """Produce a token: what is announced as ready has run, and first-call costs are paid.

    The ranks have pools as `core` says, which `scratch` made. With hot buffers the prompt goes to a host page, and a
    second token reads it from there. Raises ConfigError if the logits are not finite.
    """
    size, hosted = core.page_size, core.hot_pages > 0
    budget = least_of(selector) if hosted and selector is not None else 0
    rid, prompt = RequestId(0), (0,) * min(size, max_position)
    executor.open(rid, prompt, SamplingParams(temperature=0.0, sparse_top_k=budget))
    first = StepPlan(
        step=StepId(1), rows=(Row(0),), rids=(rid,), start=(0,), count=(len(prompt),), samples=(True,),
        tokens=prompt, grows=(), moves=(), binds=(_bind(rid, core),))
    plans = [first]
    if (hosted or core.pp_size > 1) and len(prompt) < max_position:
        plans.append(replace(first, step=StepId(2), start=(len(prompt),), count=(1,), tokens=(-1,), binds=()))
    for plan in plans:
        executor.submit(plan)
        [retired, *_] = executor.poll(block=True)
        assert isinstance(retired, Retired)
        if retired.tokens == ((),):
            raise ConfigError("a first token cannot be produced: the model's logits are not finite. "
                              "Its weights are damaged, or overflow in this --dtype")
    executor.close(rid)


def _bind(rid: RequestId, core: CoreConfig) -> Bind:
    """Two pages of each group on the device, or those of the first group on the host; a page of states may
    cover both."""
    def pages(g: int) -> tuple[HbmPage, ...]:
        first = g * core.group_base + 2 * g * core.groups[g].slab_pages      # in slabs of its own
        unit = core.groups[g].page_tokens or core.page_size
        return tuple(HbmPage(first + i) for i in range(-(-core.max_len // unit)))

    groups = range(len(core.groups))
    if not core.hot_pages:
        return Bind(Row(0), rid, tuple(pages(g) for g in groups), 0)
    others = groups[1:]
    return Bind(Row(0), rid, ((NO_HBM, NO_HBM), *(pages(g) for g in others)), 0,
                host=((DramPage(0), DramPage(1)), *((NO_DRAM,) * len(pages(g)) for g in others)),
                hot=(tuple(Hot(page) for page in pages(0)), *((),) * len(others)))
