"""Engines of another kind find nothing in storage that an engine has written, and remove nothing."""
from __future__ import annotations

import shutil

import pytest
from pair_engines import engines
from pipeline_engine import CONFIG, checkpoint

PAGE = 8
DEVICE = {"kv_cache_memory_bytes": "4M", "kv_offloading_size": "4M"}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return checkpoint(tmp_path_factory.mktemp("stored"))


def hits(prompt: tuple[int, ...]) -> int:
    return (len(prompt) - 1) // PAGE * PAGE


STRANGERS = ["the same", "weights", "rope", "heads", "dtype", "page size", "tenant", "secret"]


@pytest.mark.parametrize("num", [20, pytest.param(200, marks=pytest.mark.soak)])
def test_an_engine_hits_nothing_that_another_kind_of_engine_or_tenant_has_stored(model, tmp_path, num):
    """Prompts of two pages and more, of which an engine that is the same hits every page."""
    prompts = {rid: (rid % 97, rid // 97, *((i * i * 7 + i) % 97 for i in range(18 + rid % 8)))
               for rid in range(1, num + 1)}
    weights = tmp_path / "weights"
    shutil.copytree(model, weights)
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
                   "kv_storage_policy": "wait_complete", "kv_storage_key": key, **changed.get(who, {})}
        with engines(others.get(who, model), tmp_path, ({},), **options) as tried:
            for prompt in prompts.values():
                tried.say([(prompt, 1)], namespace=5 + (who == "tenant"))
            tried.settle()
            return [chunk.cached_by_tier.get("disk", 0) for chunk in tried.asked.cached.values()]

    assert hit("the same") == [0] * num
    assert hit("the same") == [hits(prompt) for prompt in prompts.values()]
    for who in STRANGERS[1:]:
        assert hit(who) == [0] * num, who
    assert hit("the same") == [hits(prompt) for prompt in prompts.values()], "nor do they remove it"
