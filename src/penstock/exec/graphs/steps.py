"""Which steps of a rank on a CUDA device are replayed, in the order in which they are asked."""
from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.exec.drafts.device import Ahead
from penstock.exec.graphs.capture import DecodeGraphs, Replays, decodes_of
from penstock.exec.graphs.drafts import DraftGraphs, every, widths
from penstock.exec.graphs.mixed import TOKENS, MixedGraphs
from penstock.exec.sampling.on_device import Draws
from penstock.exec.sparse.bounds import Selecting
from penstock.exec.sparse.indexer import Indexed
from penstock.exec.step.attend import Attending, Grouped, Latent
from penstock.exec.step.eager import Ran, Steps
from penstock.exec.step.step_batch import MIXED, StepBatch, sizes
from penstock.exec.step.tables import RowTables
from penstock.memory.mover import Arrivals
from penstock.model.base import Model

WHY = {         # by cause: which steps are launched kernel by kernel
    "codes": "all, as KV of MLA layers is fp8",
    "drafts": "prompts, as a layer drafts behind each step",
    "latent": "prompts, as layers are MLA",
    "selects": "prompts, as requests select what they read",
    "states": "prompts, as layers keep a state",
    "backend": "prompts, as one call cannot read pages of this model",
}


@torch.inference_mode()
def captured(model: Model, tables: RowTables, attending: Attending, draws: Draws, buckets: Sequence[int],
             seconds: float, width: int = 1, wide: int = 0, ahead: Ahead | None = None,
             rehearses: bool = False) -> tuple[list[Steps], DraftGraphs | None]:
    """Of a whole model: decode steps of so many rows, and, captured for so long, steps with prompts where
    one call attends to them; and, with drafts that the device makes, those in which a row has up to `width`
    positions, up to `wide` in all; or only these. rehearses: as `Rank.capture`."""
    if isinstance(attending, Latent) and attending.coded:       # which become floats of all that a table may have
        return [Uncaptured("codes")], None
    assert isinstance(attending, Grouped | Latent | Selecting | Indexed), "such a rank is not captured"
    rows, device = buckets[-1], tables.last_R.device
    always = ahead is not None and ahead.always
    wider = every(buckets, width, wide) if always else widths(rows, width, wide) if ahead is not None else {}
    most = max(rows, *(n * positions for n, positions in wider.items()), 1)
    decodes = (decodes_of(attending, tables.groups) if isinstance(attending, Grouped | Latent) else
               attending.decodes(most))
    replays = Replays(sum(sizes(MIXED, (TOKENS[-1], rows))), most, model.vocab_size, device, rehearses)
    plain = [] if always else [DecodeGraphs(model, tables, decodes, draws, buckets, replays)]
    for steps in plain:
        steps.capture()
    drafts = None
    if ahead is not None and wider:
        drafts = DraftGraphs(model, tables, decodes, draws, wider, replays, ahead)
        drafts.capture()
    if ahead is not None and ahead.drafter.layer:       # which writes behind each step
        return [Uncaptured("drafts")], drafts
    if not isinstance(attending, Grouped):
        return [*plain, Uncaptured("latent" if isinstance(attending, Latent) else "selects")], drafts
    if attending.states:
        return [*plain, Uncaptured("states")], drafts
    if not attending.reads_pages(tables):
        return [*plain, Uncaptured("backend")], drafts
    mixed = MixedGraphs(model, tables, attending, draws, rows, replays)
    mixed.capture(seconds)
    return [*plain, mixed], drafts


class Uncaptured(Steps):
    """Takes no step, and counts those that come: all for one cause."""

    def __init__(self, cause: str) -> None:
        self._cause, self._count, self.why = cause, 0, WHY[cause]

    def step(self, batch: StepBatch, arrivals: Arrivals) -> Ran | None:
        self._count += 1
        return None

    def stats(self) -> dict[str, float]:
        return {f'executor_launched_total{{cause="{self._cause}"}}': float(self._count)}
