"""Outputs of decode that selects serve no prompt; what a next turn computes again for that is counted."""
from __future__ import annotations

import pytest

from penstock.core.core import Core
from penstock.core.plan import Arrived, Finished, RequestId, Retired, Started, Token
from penstock.core.settings import CoreConfig

SIZE = 4


def turn(core: Core, rid: int, prompt: tuple[int, ...], new: int,
         attention: int) -> tuple[tuple[int, ...], int]:
    """Prompt and outputs of one request that is played to its end, and how much of it was cached."""
    events, tokens, cached = [Arrived(RequestId(rid), prompt, new, attention=attention)], list(prompt), -1
    while True:
        advance = core.advance(events)
        for o in advance.outputs:
            match o:
                case Started():
                    cached = o.hbm_tokens
                case Token(_, _, token):
                    tokens.append(token)
                case Finished():
                    return tuple(tokens), cached
        plan = advance.plan
        assert plan is not None
        events = [Retired(plan.step, tuple((50 + plan.step % 40,) for s in plan.samples if s))]


@pytest.mark.parametrize("attention", [0, 7], ids=["dense", "selects"])
@pytest.mark.parametrize("prompt", [8, 10, 11], ids="prompt of {} tokens".format)
def test_a_chat_turn_computes_the_answers_of_the_turn_before_again_where_they_were_selected(
        prompt: int, attention: int) -> None:
    """Once: then they are a prompt's. The tail of each turn whose page is not full was never kept."""
    core = Core(CoreConfig(page_size=SIZE, rows=2, hbm_pages=99))
    said, want = tuple(range(prompt)), 0
    chat, _ = turn(core, 1, said, 13, attention)
    for rid in range(2, 5):
        kept, old = (len(chat) - 1) // SIZE * SIZE, len(said) // SIZE * SIZE    # the last token has no KV
        said = (*chat, 90 + rid, 95)
        chat, cached = turn(core, rid, said, 13, attention)
        assert cached == (old if attention else kept)
        want += kept - cached
        assert core.stats()["prefix_recomputed"] == want
    assert (want >= 3 * 9) == bool(attention)


def test_only_what_was_decoded_as_the_prompt_will_be_counts_and_only_of_the_same_tenant() -> None:
    core = Core(CoreConfig(page_size=SIZE, rows=2, hbm_pages=99))
    chat, _ = turn(core, 1, tuple(range(8)), 13, 7)
    turn(core, 2, (*chat, 1), 1, 8)
    core.advance([Arrived(RequestId(3), (*chat, 1), 1, attention=7, namespace=5)])
    assert core.stats()["prefix_recomputed"] == 0
