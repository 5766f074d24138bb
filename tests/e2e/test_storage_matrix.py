"""Pages of one engine are read by engines of any other number of stages, of every kind of model,
decoding from the device or the host: all say what an engine without storage says, and every page hits."""
from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from pipeline_engine import CONFIG, GLM, Pipeline, checkpoint

PROMPTS = {1: tuple((7 * i) % 96 + 1 for i in range(150)), 2: tuple((i * i * 7 + i) % 97 for i in range(203))}
PAGE, NEW = 8, 16
DEVICE = {"hbm_bytes": "4M", "dram_bytes": "4M"}
HOST = {"hbm_bytes": "2M", "dram_bytes": "8M", "sparse_kv": "always"}
# KV heads; the same, of which decode selects; latent rows with an indexer.
MODELS = {"heads": (CONFIG, {}), "selecting": (CONFIG, {"sparse_top_k": 96}), "latent": (GLM, {})}
PLACES = {"device": DEVICE, "host": HOST}
CELLS = [cell for cell in product(MODELS, PLACES) if cell != ("heads", "host")]
FEW = [("selecting", "host", 2, 1), ("latent", "device", 1, 2)]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    return {name: checkpoint(tmp_path_factory.mktemp(name), config) for name, (config, _) in MODELS.items()}


def said(model: str, name: str, place: str, **options) -> tuple[dict[int, list[int]], dict[int, int]]:
    """What an engine says to the prompts, one after the other, and how many tokens of each storage had."""
    kind = {**MODELS[name][1], **PLACES[place], "page_size": PAGE, **options}
    if place == "device" and name != "heads":
        kind["sparse_kv"] = "off"
    with Pipeline(model, **kind) as engine:
        for rid, prompt in PROMPTS.items():
            engine.add(rid, prompt, NEW)
            engine.drain()
        assert bool(sum(reads.get("hot_misses", 0) for reads in engine.reads.values())) == (place == "host")
        return engine.got, {rid: started.disk_tokens for rid, started in engine.started.items()}


def hits(prompt: tuple[int, ...]) -> int:
    return (len(prompt) - 1) // PAGE * PAGE


def check(models: dict[str, str], tmp_path: Path, name: str, place: str, writer: int,
          readers: tuple[int, ...]) -> None:
    want, _ = said(models[name], name, place)
    options = {"kv_storage": f"file://{tmp_path}/store", "pp": writer}
    assert said(models[name], name, place, **options) == (want, dict.fromkeys(PROMPTS, 0))
    objects = sum(1 for _ in (tmp_path / "store" / "v1").rglob("*.0"))
    assert objects >= sum(hits(prompt) // PAGE for prompt in PROMPTS.values())
    for pp in readers:
        got, disk = said(models[name], name, place, **{**options, "pp": pp})
        assert got == want and disk == {rid: hits(prompt) for rid, prompt in PROMPTS.items()}, pp
        assert sum(1 for _ in (tmp_path / "store" / "v1").rglob("*.0")) == objects, "nothing is stored twice"


@pytest.mark.parametrize("name, place, writer, reader", FEW)
def test_two_cells(models, tmp_path, name, place, writer, reader):
    check(models, tmp_path, name, place, writer, (reader,))


@pytest.mark.soak
@pytest.mark.parametrize("writer", [1, 2, 3])
@pytest.mark.parametrize("name, place", CELLS)
def test_every_cell(models, tmp_path, name, place, writer):
    check(models, tmp_path, name, place, writer, (1, 2, 3))
