"""Which ranks are taken to hang, from what their beats have said."""
from __future__ import annotations

from penstock.exec.pipeline.beats import FRONT, LANES, STAGE, Heard, Waits, Watch


def looks(num: int, *turns: list[tuple[int, str] | None]) -> list[list[int]]:
    """Who hangs at each look, if a rank's wait was heard before it; None: nothing was heard of it. Silence is
    three looks."""
    watch, heard, found = Watch(num, 3.0), [Heard() for _ in range(num)], []
    for turn in turns:
        for one, wait in zip(heard, turn, strict=True):
            if wait is not None:
                one.messages, one.wait = one.messages + 1, wait
        found.append(watch.look(heard)[0])
    return found


def test_a_rank_of_which_nothing_is_heard_hangs():
    assert looks(2, *[[(1, FRONT), (1, FRONT)]] * 2, *[[(1, FRONT), None]] * 3) == [[]] * 4 + [[1]]


def test_one_word_is_enough_to_live():
    assert looks(1, [(0, "")], [None], [None], [(0, "")], [None], [None]) == [[]] * 6


def test_lanes_that_wait_for_each_other_hang():
    assert looks(2, *[[(7, LANES), (9, LANES)]] * 4)[-2:] == [[], [0, 1]]


def test_a_lane_that_waits_for_one_that_waits_for_the_front_hangs():
    assert looks(3, *[[(7, LANES), (9, FRONT), (2, STAGE)]] * 4)[-1] == [0, 2]


def test_nobody_hangs_while_one_computes_however_long():
    assert looks(3, *[[(7, LANES), (9, ""), (2, STAGE)]] * 50) == [[]] * 50


def test_nobody_hangs_without_work():
    assert looks(2, *[[(7, FRONT), (9, FRONT)]] * 50) == [[]] * 50


def test_waits_that_change_are_of_who_gets_on():
    assert looks(2, *[[(n, LANES), (n, LANES)] for n in range(50)]) == [[]] * 50


def test_each_wait_has_a_number_and_ends_also_by_an_error():
    waits = Waits()
    assert waits.now == (0, "")
    with waits.on(LANES):
        assert waits.now == (1, LANES)
    try:
        with waits.on(STAGE):
            assert waits.now == (2, STAGE)
            raise KeyError
    except KeyError:
        assert waits.now == (2, "")
