"""How many classes a grant passes, and how many files a spill, as `tools/stops.py` counts them."""
from __future__ import annotations

import stops

STOPS_MAX = 8
FILES_MAX = 25                      # of a spill's turn: it may only fall


def test_a_grant_passes_few_classes_at_each_end() -> None:
    decode, prefill = stops.of_a_grant()
    assert decode[0] == "DecodeSide" and decode[-1] == "PairWriter" and len(decode) <= STOPS_MAX, decode
    assert prefill[0] == "PairReader" and prefill[-1] == "PrefillSide" and len(prefill) <= STOPS_MAX, prefill


def test_a_spill_touches_few_files() -> None:
    assert len(files := stops.of_a_spill()) <= FILES_MAX, files
