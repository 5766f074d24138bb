"""A tiny model with states over HTTP: in each layout its tokens are those of one engine."""
from __future__ import annotations

import pytest
from pair_server import PAIR, SERVED, prompts, said, serving
from pipeline_engine import STATES, checkpoint

KEPT = ("--state-interval", "64")
HOSTED = (*SERVED["hosted"], *KEPT)
RESIDENT = (*SERVED["resident"], *KEPT)
DRAFTED, RIGHT = (f'spec_{kind}_tokens_total{{drafter="ngram"}}' for kind in ("draft", "accepted"))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return checkpoint(tmp_path_factory.mktemp("states"), STATES)


def answers(model, folder, *flags):
    folder.mkdir(exist_ok=True)
    with serving(model, folder, *flags) as server:
        found = [said(server.ask(prompt))[0] for prompt in prompts()]
        return found, server.stats()


@pytest.fixture(scope="module")
def want(model, tmp_path_factory):
    return answers(model, tmp_path_factory.mktemp("one"), *RESIDENT)[0]


@pytest.fixture(scope="module")
def hosted(model, tmp_path_factory):
    """Resident selection."""
    flags = [flag if flag != "always" else "auto" for flag in HOSTED]
    return answers(model, tmp_path_factory.mktemp("selects"), *flags)[0]


@pytest.mark.soak
@pytest.mark.parametrize("layout", [("--pp", "2"), PAIR, ("--pp", "2", *PAIR)], ids=" ".join)
@pytest.mark.parametrize("place", ["resident", "hosted"])
def test_every_layout_says_what_one_engine_says(model, tmp_path, want, hosted, layout, place):
    got, _ = answers(model, tmp_path / "l", *(RESIDENT if place == "resident" else HOSTED), *layout)
    assert got == (want if place == "resident" else hosted)


@pytest.mark.parametrize("layout", [
    ("--pp", "2"), pytest.param(("--pp", "3", *PAIR), marks=pytest.mark.sweep)], ids=" ".join)
def test_stages_draft_and_say_what_one_engine_says(model, tmp_path, want, layout):
    """Also of few words, which repeat: what is looked up is right at times."""
    few = {"temperature": 1, "seed": 3, "max_tokens": 60, "logit_bias": dict.fromkeys("567", 60)}
    asked, drafts = [], ("--speculative-method", "ngram", "--prompt-lookup-min", "1")
    for flags in ((), (*layout, *drafts)):
        (folder := tmp_path / str(len(flags))).mkdir()
        with serving(model, folder, *RESIDENT, *flags) as server:
            asked.append([said(server.ask(prompt, **few))[0] for prompt in prompts()])
            got = [said(server.ask(prompt))[0] for prompt in prompts()]
            if flags:
                server.until(lambda stats=server.stats: 0 < stats()[RIGHT] < stats()[DRAFTED])
    assert got == want and asked[0] == asked[1]


def test_hosted_it_says_what_resident_selection_says(model, tmp_path, hosted):
    assert answers(model, tmp_path / "h", *HOSTED)[0] == hosted


@pytest.mark.soak
@pytest.mark.parametrize("place", ["resident", "hosted"])
def test_a_restarted_server_hits_states_in_storage(model, tmp_path, want, hosted, place):
    flags = (*(RESIDENT if place == "resident" else HOSTED), "--kv-offloading-size", "8M",
             "--kv-storage", f"file://{tmp_path}/kv")
    for turn in range(2):
        got, stats = answers(model, tmp_path / str(turn), *flags)
        assert got == (want if place == "resident" else hosted)
    assert stats["prefix_disk_hits"] >= 128
