"""Which steps of a rank on a CUDA device are replayed, in the order in which they are asked."""
from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.core.plan import StepPlan
from penstock.exec.graphs.capture import DecodeGraphs, GroupedDecodes, Replays
from penstock.exec.graphs.drafts import DraftGraphs, widest
from penstock.exec.graphs.mixed import TOKENS, MixedGraphs, lengths
from penstock.exec.sampling.on_device import Draws
from penstock.exec.sparse.bounds import Selecting
from penstock.exec.sparse.indexer import Indexed
from penstock.exec.step.attend import Attending, Grouped, Latent
from penstock.exec.step.eager import Ran, Steps
from penstock.exec.step.tables import RowTables
from penstock.memory.mover import Arrivals
from penstock.model.base import Model


@torch.inference_mode()
def captured(model: Model, tables: RowTables, attending: Attending, draws: Draws, buckets: Sequence[int],
             seconds: float, width: int = 1, wide: int = 0) -> list[Steps]:
    """Of a whole model: decode steps of so many rows, those in which a row has up to `width` positions, up
    to `wide` in all, and, captured for so long, steps with prompts where one call attends to them."""
    if isinstance(attending, Latent):       # what it is given grows with the longest context of a step
        return [Uncaptured("latent")]
    assert isinstance(attending, Grouped | Selecting | Indexed), "such a rank is not captured"
    rows, device = buckets[-1], tables.last_R.device
    positions = widest(rows, width, wide) if width > 1 else ()
    most = max(rows, *positions, 1)
    decodes = GroupedDecodes(attending, tables) if isinstance(attending, Grouped) else attending.decodes(most)
    replays = Replays(sum(lengths((TOKENS[-1], rows))), most, model.vocab_size, device)
    graphs = [DecodeGraphs(model, tables, decodes, draws, buckets, replays)]
    if positions:
        graphs.append(DraftGraphs(model, tables, decodes, draws, positions, replays, width))
    for kind in graphs:
        kind.capture()
    if not isinstance(attending, Grouped):
        return [*graphs, Uncaptured("selects")]
    if attending.states:
        return [*graphs, Uncaptured("states")]
    if not attending.reads_pages(tables):
        return [*graphs, Uncaptured("backend")]
    mixed = MixedGraphs(model, tables, attending, draws, rows, replays)
    mixed.capture(seconds)
    return [*graphs, mixed]


class Uncaptured(Steps):
    """Takes no step, and counts those that come: all for one cause."""

    def __init__(self, cause: str) -> None:
        self._cause, self._count = cause, 0

    def step(self, plan: StepPlan, arrivals: Arrivals) -> Ran | None:
        self._count += 1
        return None

    def stats(self) -> dict[str, float]:
        return {f'executor_launched_total{{cause="{self._cause}"}}': float(self._count)}
