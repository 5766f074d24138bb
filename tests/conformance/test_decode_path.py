"""The tables of docs/design/a-requests-life.md, "A decode step, file by file", name what such a step enters."""
from __future__ import annotations

import re
import sys
from pathlib import Path

import hosted
import on_a_device
import prompts_engine
import pytest
import torch

from penstock.exec.graphs.capture import DecodeGraphs
from penstock.exec.sampling.on_device import Draws
from penstock.exec.worker import Worker

SOURCE = Path(__file__).parents[2] / "src/penstock"
PAGE = (SOURCE.parents[1] / "docs/design/a-requests-life.md").read_text()
ROWS = re.findall(r"(?m)^\|.*", PAGE.partition("## A decode step, file by file\n")[2].partition("\n## ")[0])
NAMED = sorted(set(re.findall(r"`(\w+/[\w/]+(?:\.py|/))`", "\n".join(ROWS))))
# Not entered by the engines below, which have no process around them and no packed weights.
AROUND = ("api/", "engine/", "text/", "kernels/fused/layer/stack.py")


def test_tables_of_a_decode_step_name_files_that_exist():
    assert len(NAMED) > 30 and [name for name in NAMED if not (SOURCE / name).exists()] == []


@pytest.fixture
def entered(monkeypatch):
    """Files that an engine enters while it drains, but for those of steps with prompts."""
    found, launch = set[str](), Worker._launch

    def note(frame, event, _):
        if event == "call":
            found.add(frame.f_code.co_filename)

    def launched(worker, plan):
        sys.setprofile(note if plan.rows and max(plan.tokens) < 0 else None)
        launch(worker, plan)
        sys.setprofile(note)
    monkeypatch.setattr(Worker, "_launch", launched)
    yield found, note
    sys.setprofile(None)


def test_decode_steps_enter_the_files_of_the_tables(entered, monkeypatch):
    found, note = entered
    on_a_device.plainly(monkeypatch)
    for family in ("grouped", "mla", "state", "bounds", "latent"):
        for captured in (False, True):
            monkeypatch.setattr(hosted, "KIND", [family])
            selects = family in hosted.KINDS and family != "state"
            engine = hosted.Engine() if selects else prompts_engine.Engine(family=family)
            if captured:
                draws = Draws(61, engine.rank._tables.last_R.numel() - 1, torch.device("cpu"), "reference")
                engine.rank._steps.insert(0, on_a_device.recomputed(DecodeGraphs, engine.rank, draws, (5,)))
            engine.add(1, hosted.text(1, 130 if selects else 20), 6)
            sys.setprofile(note)
            engine.drain()
            sys.setprofile(None)
    paths = [str(SOURCE / name) for name in NAMED if not name.startswith(AROUND)]
    assert [path for path in paths if not any(name.startswith(path) for name in found)] == []
