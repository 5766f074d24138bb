"""Which ranks are taken to hang, from what their beats have said."""
from __future__ import annotations

from penstock.exec.pipeline.hangs import EXECUTOR, STAGE, TP_RANKS, RankStatus, Waits, Watch


def looks(num: int, *turns: list[tuple[int, str] | tuple[int, str, int] | None]) -> list[list[int]]:
    """Who hangs at each look, if a rank's wait was heard before it, and the step on its device; None: nothing
    was heard of it; []: it serves from now on. Silence is three looks, a step before that five."""
    watch, heard, found = Watch(num, 3.0, 5.0), [RankStatus() for _ in range(num)], []
    for turn in turns:
        if not turn:
            watch.serves()
            continue
        for one, wait in zip(heard, turn, strict=True):
            if wait is not None:
                one.messages, one.wait, one.step = one.messages + 1, wait[:2], (*wait, 0)[2]
        found.append(watch.look(heard)[0])
    return found


def test_a_rank_of_which_nothing_is_heard_hangs():
    assert looks(2, *[[(1, EXECUTOR), (1, EXECUTOR)]] * 2, *[[(1, EXECUTOR), None]] * 3) == [[]] * 4 + [[1]]


def test_one_word_is_enough_to_live():
    assert looks(1, [(0, "")], [None], [None], [(0, "")], [None], [None]) == [[]] * 6


def test_lanes_that_wait_for_each_other_hang():
    assert looks(2, *[[(7, TP_RANKS), (9, TP_RANKS)]] * 4)[-2:] == [[], [0, 1]]


def test_a_lane_that_waits_for_one_that_waits_for_the_front_hangs():
    assert looks(3, *[[(7, TP_RANKS), (9, EXECUTOR), (2, STAGE)]] * 4)[-1] == [0, 2]


def test_nobody_hangs_while_one_computes_however_long():
    assert looks(3, *[[(7, TP_RANKS), (9, ""), (2, STAGE)]] * 50) == [[]] * 50


def test_nobody_hangs_without_work():
    assert looks(2, *[[(7, EXECUTOR), (9, EXECUTOR)]] * 50) == [[]] * 50


def test_waits_that_change_are_of_who_gets_on():
    assert looks(2, *[[(n, TP_RANKS), (n, TP_RANKS)] for n in range(50)]) == [[]] * 50


def test_each_wait_has_a_number_and_ends_also_by_an_error():
    waits = Waits()
    assert waits.now == (0, "")
    with waits.on(TP_RANKS):
        assert waits.now == (1, TP_RANKS)
    try:
        with waits.on(STAGE):
            assert waits.now == (2, STAGE)
            raise KeyError
    except KeyError:
        assert waits.now == (2, "")


SERVES = []


def test_devices_that_do_not_end_a_step_hang_whoever_else_waits():
    assert looks(2, SERVES, *[[(1, "", 4), (1, "", 4)]] * 4)[-2:] == [[], [0, 1]]
    assert looks(2, SERVES, *[[(n, EXECUTOR), (1, STAGE, 4)] for n in range(4)])[-1] == [1]


def test_a_lane_whose_device_waits_for_one_that_compiles_does_not_hang():
    assert looks(2, SERVES, *[[(1, "", 4), (1, "")]] * 50) == [[]] * 50


def test_steps_that_end_are_no_hang():
    assert looks(1, SERVES, *[[(1, "", n // 3)] for n in range(50)]) == [[]] * 50


def test_a_device_has_longer_before_it_serves_and_a_while_longer_than_its_longest_step():
    assert looks(1, *[[(1, "", 1)]] * 6)[-2:] == [[], [0]]
    told = looks(1, *[[(1, "", 1)]] * 3, SERVES, *[[(1, "", 2)]] * 9)
    assert told[-2:] == [[], [0]] and not any(told[:-1])        # it took two looks, and may take eight
