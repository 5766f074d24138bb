"""Pages of one engine are read by engines of any other number of stages, of every kind of model,
decoding from the device or the host: all say what an engine without storage says, and every page hits."""
from __future__ import annotations

import shutil

import pytest
from pipeline_engine import CONFIG, GLM, Pipeline, checkpoint

from penstock.config.request.params import SamplingParams

PROMPTS = {1: tuple((7 * i) % 96 + 1 for i in range(150)), 2: tuple((i * i * 7 + i) % 97 for i in range(203))}
PAGE, NEW = 8, 16
DEVICE = {"kv_cache_memory_bytes": "4M", "kv_offloading_size": "4M"}
HOST = {"kv_cache_memory_bytes": "2M", "kv_offloading_size": "8M", "host_decode": "always"}
# KV heads; the same, of which decode selects; MLA KV entries with an indexer.
MODELS = {"heads": (CONFIG, {}), "selecting": (CONFIG, {"sparse_top_k": 96}), "latent": (GLM, {})}
PLACES = {"device": DEVICE, "host": HOST}
# Of the matrix of writers and readers that tests/conformance/test_executor_storage.py has in one process.
FEW = [("selecting", "host", 2, 1), ("latent", "device", 1, 2)]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    return {name: checkpoint(tmp_path_factory.mktemp(name), config) for name, (config, _) in MODELS.items()}


def said(model: str, name: str, place: str, **options) -> tuple[dict[int, list[int]], dict[int, int]]:
    """What an engine says to the prompts, one after the other, and how many tokens of each storage had."""
    kind = {**MODELS[name][1], **PLACES[place], "page_size": PAGE, **options}
    if place == "device" and name != "heads":
        kind["host_decode"] = "off"
    with Pipeline(model, **kind) as engine:
        for rid, prompt in PROMPTS.items():
            engine.add(rid, prompt, NEW)
            engine.drain()
        assert bool(sum(reads.get("hot_misses", 0) for reads in engine.reads.values())) == (place == "host")
        return engine.got, {rid: started.disk_tokens for rid, started in engine.started.items()}


def hits(prompt: tuple[int, ...]) -> int:
    return (len(prompt) - 1) // PAGE * PAGE


@pytest.mark.parametrize("name, place, writer, reader", FEW)
def test_engines_of_other_stages_read_it(models, tmp_path, name, place, writer, reader):
    want, _ = said(models[name], name, place)
    options = {"kv_storage": f"file://{tmp_path}/store"}
    assert said(models[name], name, place, pp=writer, **options) == (want, dict.fromkeys(PROMPTS, 0))
    objects = sum(1 for _ in (tmp_path / "store" / "v1").rglob("*.0"))
    assert objects >= sum(hits(prompt) // PAGE for prompt in PROMPTS.values())
    got, disk = said(models[name], name, place, pp=reader, **options)
    assert got == want and disk == {rid: hits(prompt) for rid, prompt in PROMPTS.items()}
    assert sum(1 for _ in (tmp_path / "store" / "v1").rglob("*.0")) == objects, "nothing is stored twice"


STRANGERS = ["the same", "weights", "rope", "heads", "dtype", "page size", "tenant", "secret"]


@pytest.mark.parametrize("num", [20, pytest.param(200, marks=pytest.mark.soak)])
def test_an_engine_hits_nothing_that_another_kind_of_engine_or_tenant_has_stored(models, tmp_path, num):
    """Prompts of two pages and more, of which an engine that is the same hits every page."""
    prompts = {rid: (rid % 97, rid // 97, *((i * i * 7 + i) % 97 for i in range(18 + rid % 8)))
               for rid in range(1, num + 1)}
    weights = tmp_path / "weights"
    shutil.copytree(models["heads"], weights)
    data = bytearray((weights / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (weights / "model.safetensors").write_bytes(data)
    others = {"weights": str(weights), "rope": checkpoint(tmp_path / "rope", {**CONFIG, "rope_theta": 1e6}),
              "heads": checkpoint(tmp_path / "heads", {**CONFIG, "num_attention_heads": 8, "head_dim": 8,
                                                       "num_key_value_heads": 4})}
    changed = {"dtype": {"dtype": "bfloat16"}, "page size": {"page_size": 16}}
    for n in (1, 2):
        (tmp_path / f"{n}").write_text("0123456789abcdef" * n)
        (tmp_path / f"{n}").chmod(0o600)

    def hit(who: str) -> list[int]:
        key = str(tmp_path / ("2" if who == "secret" else "1"))
        options = {**DEVICE, "page_size": PAGE, "kv_storage": f"file://{tmp_path}/store",
                   "kv_storage_key": key, **changed.get(who, {})}
        with Pipeline(others.get(who, models["heads"]), **options) as engine:
            for rid, prompt in prompts.items():
                params = SamplingParams(temperature=0.0)
                engine.tell(rid, prompt, 1, params, namespace=5 + (who == "tenant"))
                engine.drain()
            return [engine.started[rid].disk_tokens for rid in prompts]

    assert hit("the same") == [0] * num
    assert hit("the same") == [hits(prompt) for prompt in prompts.values()]
    for who in STRANGERS[1:]:
        assert hit(who) == [0] * num, who
    assert hit("the same") == [hits(prompt) for prompt in prompts.values()], "nor do they remove it"
