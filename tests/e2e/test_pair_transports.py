"""Pairs of processes whose KV is READ by another transport say what one engine says, and outlive a kill."""
from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path

import pytest
from pair_server import SERVED, prompts, said, serving
from pipeline_engine import checkpoint

FLAG = "--disaggregation-transfer-backend"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return checkpoint(tmp_path_factory.mktemp("transports"))


@pytest.mark.soak
@pytest.mark.parametrize("place", SERVED)
@pytest.mark.parametrize("transport", ["nixl", "mooncake"])
def test_kv_that_is_read_is_the_kv_and_a_killed_prefill_end_is_met_again(
    model: str, tmp_path: Path, transport: str, place: str
) -> None:
    if importlib.util.find_spec(transport) is None:
        pytest.skip(f"pip install '.[{transport}]'")
    with serving(model, tmp_path, *SERVED[place]) as one:
        want = [said(one.ask(prompt))[0] for prompt in prompts()]
    with serving(model, tmp_path, *SERVED[place], "--prefill-replicas", "1", "--decode-replicas", "1", FLAG,
                 transport) as pair:
        assert [said(pair.ask(prompt))[0] for prompt in prompts()] == want
        assert pair.stats()["pair_delivered_total"] == len(prompts())
        os.kill(pair.info()["prefill"]["pid"], signal.SIGKILL)
        assert [said(pair.ask(prompt, cache_salt="x"))[0] for prompt in prompts()] == want
        pair.until(lambda: pair.http.get("/health").json() == {"status": "ok"})
        before = pair.stats()["pair_delivered_total"]
        assert [said(pair.ask(prompt, cache_salt="y"))[0] for prompt in prompts()] == want
        assert pair.stats()["pair_delivered_total"] > before
