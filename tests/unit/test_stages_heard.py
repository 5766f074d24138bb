"""What the first stage keeps of tokens that nobody asks it for."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import cast

import torch

from penstock.config.request.params import SamplingParams
from penstock.core.plan import Bind, RequestId, Row, StepId
from penstock.exec.sampling.tokens import FromLastStage
from penstock.exec.step.eager import Ran
from penstock.exec.step.links import MOST_AWAITED, Sampled, TokensFromLast
from penstock.exec.step.step_batch import StepBatch
from penstock.exec.step.tables import RowTables


class Source:
    """Every step has sampled its own number for each of its requests, at once."""

    def __init__(self, rows: Mapping[int, int] = MappingProxyType({})) -> None:
        """rows: of steps with more than one."""
        self.taken, self.rows = list[int](), rows

    def take(self, step: StepId) -> Sampled:
        self.taken.append(step)
        return Sampled(((step,),) * self.rows.get(step, 1))


def test_requests_of_one_token_leave_nothing_behind() -> None:
    source = Source()
    heard = TokensFromLast(source)
    for n in range(1, 1001):
        heard.open(RequestId(n))
        heard.expect(StepId(n), (RequestId(n),))
        if n > 3:
            heard.close(RequestId(n - 3))
    assert len(heard._awaited) == MOST_AWAITED
    assert source.taken == list(range(1, 1001 - MOST_AWAITED)), "in order, and none twice"
    assert heard.last(RequestId(1000)) == 1000


class Sees:
    """What the first stage's device is asked to wait for."""

    def __init__(self) -> None:
        self.expected, self.waited = 0, list[int]()

    def expect(self) -> int:
        self.expected += 1
        return self.expected

    def wait(self, number: int, last_R: torch.Tensor) -> None:
        self.waited.append(number)


def decode(step: int, *rids: int, tokens: Sequence[int] = ()) -> StepBatch:
    n = len(rids)
    return StepBatch(StepId(step), [RequestId(rid) for rid in rids], range(n), [step] * n, [1] * n, [True] * n,
                     tokens or [-1] * n, [0] * n)


def test_a_device_waits_for_tokens_that_the_host_has_not_heard_of() -> None:
    """For the newest of its rows, and for none that is known: of a prompt, of another engine, of a row bound anew."""
    source, sees = Source({3: 3}), Sees()
    tables = SimpleNamespace(last_R=torch.zeros(4))
    tokens = FromLastStage(100, TokensFromLast(source), cast(RowTables, tables), sees)
    for rid in (1, 2, 3):
        tokens.open(RequestId(rid), (5,), SamplingParams(), 0, ())
    tokens.given(RequestId(3), [77])
    prompts = tokens.feed(decode(1, 1, tokens=[5]))
    assert not prompts.heard and not sees.waited
    tokens.sample(prompts, Ran(()))
    tokens.sample(decode(2, 2, tokens=[5]), Ran(()))
    both = tokens.feed(decode(3, 1, 2, 3))
    assert list(both.heard) == [-1, -1, 77] and sees.waited == [2] and source.taken == []
    assert list(both.launched["id_T"]) == [-1, -1, 77] and list(both.tokens) == [-1, -1, -1]
    tokens.sample(both, Ran(()))
    again = Bind(Row(0), RequestId(1), (), 1)
    assert tokens.bind(again) == 1 and source.taken == [1, 2, 3]        # its first of two: the other was never retired
    assert list(tokens.feed(decode(4, 1, 2, 3)).heard) == [1, 3, 3] and sees.waited == [2]
