"""A prefill engine delivers the recall model's rows and indexer keys: a wrong one is a wrong answer."""
from __future__ import annotations

from pathlib import Path

import pytest
from pair_engines import PairOfEnds
from recall_engine import FOLDER, ids

from penstock.eval import tasks
from penstock.eval.tasks import Size

TOPK = 256          # of config.json
# A device that holds hot buffers and indexer keys, and not the requests.
PLACES = {"resident": {"kv_cache_memory_bytes": "16M", "host_decode": "off"},
          "hosted": {"kv_cache_memory_bytes": "3M", "kv_offloading_size": "64M", "host_decode": "always",
                     "hot_buffer_tokens": TOPK + 16}}


@pytest.mark.sweep
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("place", PLACES)
def test_what_a_prefill_engine_delivers_is_recalled(tmp_path: Path, place: str, stages: int) -> None:
    questions = tasks.in_words("tracking", Size(contexts=(640,), samples=2, questions=2, seed=3,
                                                tokens_of=lambda text: len(text.split())))
    with PairOfEnds(str(FOLDER), tmp_path, decode={"pp": stages}, page_size=16, max_model_len=1024,
                    **PLACES[place]) as pair:
        rids = [pair.decode.submit(ids(q.prompt), q.max_tokens) for q in questions]
        for turn in range(200):
            if turn % 5 == 0 and (rid := rids[turn // 5 % len(rids)]) in pair.decode.open:
                pair.decode.pause(rid)
            pair.turn()
        pair.finish()
        assert [tuple(pair.decode.got[rid]) for rid in rids] == [ids(q.answer) for q in questions]
        assert pair.decode.loop.stats()["pair_delivered_total"] == len(rids)
        pair.settle()
