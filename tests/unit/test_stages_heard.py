"""What the first stage keeps of tokens that nobody asks it for."""
from __future__ import annotations

from penstock.core.plan import RequestId, StepId
from penstock.exec.step.links import MOST_AWAITED, Sampled, TokensFromLast


class Source:
    """Every step has sampled its own number for each of its requests, at once."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def take(self, step: StepId) -> Sampled:
        self.taken.append(step)
        return Sampled(((step,),))


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
