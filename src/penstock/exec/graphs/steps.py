"""At start: which kinds of steps a rank on a CUDA device captures, and why not the others. No step passes here.

Kinds: "decodes", one position per row (`capture.py`); "drafts", further positions that the device proposes
(`drafts.py`); "prompts", with decodes among them (`mixed.py`). A pipeline stage has `stages.py`. Each kind has its
own buckets. `Worker._execute` runs drafts of the device as such, else tries decodes, prompts and `step/eager.py`.
"""
from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.exec.drafts.device import Ahead
from penstock.exec.graphs.capture import DecodeGraphs, Replays
from penstock.exec.graphs.drafts import DraftGraphs, every, widths
from penstock.exec.graphs.mixed import TOKENS, MixedGraphs
from penstock.exec.graphs.stages import CAPTURED, StageGraphs
from penstock.exec.sampling.on_device import Draws
from penstock.exec.step.attend import Attending
from penstock.exec.step.eager import Steps
from penstock.exec.step.links import ALONE, Links
from penstock.exec.step.step_batch import MIXED, sizes
from penstock.exec.step.tables import RowTables
from penstock.model.base import Model

WHY = {         # by cause: which steps are launched kernel by kernel
    "drafts": "prompts, as a layer drafts behind each step",
    "fp8": "prompts, as KV is fp8",
    "latent": "prompts, as layers are MLA",
    "selects": "prompts, as requests select what they read",
    "states": "prompts, as layers keep a state",
    "backend": "prompts, as one call cannot read pages of this model",
    "off": "all, as --no-cuda-graphs says",
    "stages": "prompts and rows with drafts, as layers are cut into stages",
    "layer": "all, as a layer drafts behind each step of the last stage",
    "shared": "all, as ranks share a GPU",
}


def uncaptured(ranks: Sequence[str], *, graphs: bool, alone: bool) -> str:
    """Which steps of ranks on GPUs are launched kernel by kernel, and why; "": none. ranks: `Worker.uncaptured` of
    each; alone: each has a GPU of its own."""
    for holds, cause in ((not graphs, "off"), (not alone, "shared")):
        if holds:
            return WHY[cause]
    return ranks[0] if len(set(ranks)) == 1 else "; ".join(
        f"rank {i}: {why or 'none'}" for i, why in enumerate(ranks))


def cause(attending: Attending, ahead: Ahead | None, links: Links = ALONE, layer: bool = False) -> str:
    """Why steps with prompts are not captured, or all, of WHY; "": they are. layer: one drafts behind each step of
    this stage."""
    if links != ALONE:
        return "layer" if layer else "stages"
    if ahead is not None and ahead.drafter.layer:
        return "drafts"
    return attending.uncaptured()


@torch.inference_mode()
def captured(model: Model, tables: RowTables, attending: Attending, draws: Draws | None, buckets: Sequence[int],
             seconds: float, width: int = 1, wide: int = 0, ahead: Ahead | None = None,
             rehearses: bool = False, links: Links = ALONE) -> tuple[list[Steps], DraftGraphs | None]:
    """Capture the steps of this rank: (ways to run steps, in the order in which they are tried; steps with drafts).

    A whole model captures decode steps for each of `buckets` rows, and for up to `seconds` steps with prompts. With
    drafts that the device makes it also captures those in which a row has up to `width` positions, up to `wide` in all,
    or only these. One of several pipeline stages captures decode steps, while all others do. rehearses: as
    `Worker.capture`."""
    if links != ALONE and model.drafting is not None:
        if links.before is not None:
            for _ in buckets:
                links.before.take(CAPTURED)
        return [], None
    rows, device = buckets[-1], tables.last_R.device
    always = ahead is not None and ahead.always
    wider = every(buckets, width, wide) if always else widths(rows, width, wide) if ahead is not None else {}
    most = max(rows, *(n * positions for n, positions in wider.items()), 1)
    vocab_size = model.vocab_size if model.stage.heads else 0
    replays = Replays(sum(sizes(MIXED, (TOKENS[-1], rows))), most, vocab_size, device, rehearses)
    if links != ALONE:
        stage = StageGraphs(model, tables, attending, draws, replays, buckets, links)
        stage.capture()
        return [stage], None
    assert draws is not None, "a whole model samples"
    given = model, tables, attending, draws, replays
    decodes = None if always else DecodeGraphs(*given, buckets)
    drafts = DraftGraphs(*given, wider, ahead) if ahead is not None and wider else None
    prompts = None if cause(attending, ahead) else MixedGraphs(*given, rows, seconds)
    for graphs in (decodes, drafts, prompts):
        if graphs is not None:
            graphs.capture()
    return [graphs for graphs in (decodes, prompts) if graphs is not None], drafts
