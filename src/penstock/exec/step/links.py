"""What the stages of a pipeline hand to each other: hidden states to the next, sampled tokens to the first.

Owns the ends of these links and what the first stage has heard. Everything is labelled with its step,
and taken by that label: a stage that is a step off fails at once. Decides nothing.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, TypeVar

from torch import Tensor

from penstock.config.settings.tree import Config
from penstock.core.plan import RequestId, StepId
from penstock.model.base import Boundary, GlobalLayer, Stage
from penstock.model.parts import TpRank, even

T_contra = TypeVar("T_contra", contravariant=True)
T_co = TypeVar("T_co", covariant=True)


class Sampled(NamedTuple):
    """tokens: as `rank.Stepped.tokens`; drafts: of each of these requests what may come next, as far as the
    last stage says, for the first to decide; (): of none."""

    tokens: tuple[tuple[int, ...], ...]
    drafts: tuple[tuple[int, ...], ...] = ()


class Puts(Protocol[T_contra]):
    def put(self, step: StepId, what: T_contra) -> None:
        """Hand over what `step` made: the caller may overwrite it once this returns. Never waits for whoever
        takes it, but for room beside what that has not taken."""


class Takes(Protocol[T_co]):
    def take(self, step: StepId) -> T_co:
        """What `step` made; waits until it is there. Asserts that it is the oldest not taken yet."""

    def arrived(self) -> bool | None:
        """Whether `take` would not wait; None: steps that take from here are not launched ahead of answers."""


class Sees(Protocol):
    """On a first stage whose GPU the last stage's writes tokens to."""

    def expect(self) -> int:
        """A step samples: its number, of all that have."""

    def wait(self, number: int, last_R: Tensor) -> None:
        """What is launched from now on waits until that step has sampled, and finds the last token of each row
        in last_R, of those bound since some other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The ends that one stage holds: `before` is None on the first stage, `after` on the last; sampled
    tokens go from `tell` of the last to `hear` of the first. Of one stage alone all are None. Where GPUs reach
    each other the last stage, once for each step that samples, `shows` the last tokens of its rows, which the
    first `sees`."""

    before: Takes[Boundary] | None = None
    after: Puts[Boundary] | None = None
    tell: Puts[Sampled] | None = None
    hear: Takes[Sampled] | None = None
    shows: Callable[[Tensor], None] | None = None
    sees: Sees | None = None

    @property
    def ahead(self) -> bool:
        """Whether a GPU may be given steps ahead of the answers of those before."""
        if self.before is None:
            return self.after is None or self.sees is not None
        return self.before.arrived() is not None


ALONE = Links()


def split(layers: Sequence[int]) -> list[Stage]:
    """Stages of so many layers each, in order. Asserts that each has one at least."""
    assert layers and min(layers) >= 1, f"stages of {list(layers)} layers"
    ends = [sum(layers[:i + 1]) for i in range(len(layers))]
    return [Stage(GlobalLayer(end - n), GlobalLayer(end), embeds=i == 0, heads=i == len(layers) - 1)
            for i, (n, end) in enumerate(zip(layers, ends, strict=True))]


def of_config(config: Config, num_layers: int) -> list[Stage]:
    """What each rank has, as --pp, --pp-layers, --tp and --ep ask for, of a config that `check_model` has
    taken: all TP ranks of the first stage, then of the next. The last stages, which also have the head, get
    fewer layers."""
    device = config.device
    layers = [int(n) for n in device.pp_layers] or even(num_layers, device.pp)
    assert min(layers) >= 1 and sum(layers) == num_layers, layers
    block = 32 if config.model.dtype == "gguf" else 16
    tp_ranks = [TpRank(i, device.tp, device.expert_ranges, block) for i in range(device.tp)]
    method = config.schedule.speculative_method
    return [replace(stage, tp_rank=tp_rank, drafts=method == "mtp" and stage.heads,
                    inputs=method in ("mtp", "eagle3") and stage.heads)
            for stage in split(layers) for tp_rank in tp_ranks]


def nodes_of(config: Config) -> list[range]:
    """The ranks of each machine, of a config that `check` has taken: whole stages, or TP ranks of one stage."""
    device, nodes = config.device, config.nodes.num
    if nodes <= device.pp:
        sizes = [n * device.tp for n in even(device.pp, nodes)]
    else:
        sizes = even(device.tp, nodes // device.pp) * device.pp
    ends = [sum(sizes[:i + 1]) for i in range(nodes)]
    return [range(end - n, end) for end, n in zip(ends, sizes, strict=True)]


MOST_AWAITED = 128          # steps: more than plans can be in flight (64 stages and the one ahead)


class TokensFromLast:
    """On the first of several stages: output tokens of open requests, as the last stage samples them.

    Waits for a step only when a row needs a token of it: a row that decodes needs its newest, and a
    bind what its request has had. So stages run ahead of each other as far as plans do.
    """

    def __init__(self, source: Takes[Sampled]) -> None:
        self._source = source
        self._outputs: dict[RequestId, list[int]] = {}
        self._drafts: dict[RequestId, tuple[int, ...]] = {}        # that came with its newest
        self._newest: dict[RequestId, StepId] = {}                 # the last step that sampled it
        self._awaited: deque[tuple[StepId, tuple[RequestId, ...]]] = deque()
        self._taken = StepId(0)                                    # what was sampled up to here is known

    def open(self, rid: RequestId) -> None:
        self._outputs[rid] = []

    def given(self, rid: RequestId, tokens: Sequence[int]) -> None:
        """Output tokens that another engine has sampled, before any of this one."""
        self._outputs[rid] += tokens

    def close(self, rid: RequestId) -> None:
        del self._outputs[rid]
        self._newest.pop(rid, None)
        self._drafts.pop(rid, None)

    def expect(self, step: StepId, rids: tuple[RequestId, ...]) -> None:
        """`step` samples these, in this order; this stage has done its part of it."""
        self._awaited.append((step, rids))
        for rid in rids:
            self._newest[rid] = step
        # Requests of one token are never asked for what they had: those of steps that ended long ago.
        while len(self._awaited) > MOST_AWAITED:
            self._listen(self._awaited[0][0])

    def known(self, rid: RequestId) -> bool:
        """Whether `last` would not wait."""
        return self._newest.get(rid, StepId(0)) <= self._taken

    def last(self, rid: RequestId) -> int:
        """The newest output token; 0 before the first."""
        self._listen(self._newest.get(rid, StepId(0)))
        outputs = self._outputs[rid]
        return outputs[-1] if outputs else 0

    def outputs(self, rid: RequestId) -> Sequence[int]:
        """All of them so far."""
        self.last(rid)
        return self._outputs[rid]

    def drafts(self, rid: RequestId) -> tuple[int, ...]:
        """What may come next of it, as far as the last stage says."""
        self.last(rid)
        return self._drafts.get(rid, ())

    def settle(self) -> None:
        """Take all that has been sampled: nobody will ask for it any more."""
        if self._awaited:
            self._listen(self._awaited[-1][0])

    def _listen(self, until: StepId) -> None:
        while self._awaited and self._awaited[0][0] <= until:
            self._taken, rids = self._awaited.popleft()
            found = self._source.take(self._taken)
            drafts = found.drafts or ((),) * len(rids)
            for rid, tokens, next_ones in zip(rids, found.tokens, drafts, strict=True):
                if (outputs := self._outputs.get(rid)) is not None:        # else it has ended
                    outputs += tokens
                    self._drafts[rid] = next_ones

    def rewind(self, rid: RequestId, emitted: int) -> int:
        """Forget output tokens from `emitted` on, sampled ahead and never retired; returns the newest."""
        self.last(rid)
        outputs = self._outputs[rid]
        assert emitted <= len(outputs), f"{emitted} tokens retired, {len(outputs)} heard of"
        if emitted < len(outputs):
            self._drafts.pop(rid, None)
        del outputs[emitted:]
        return outputs[-1] if outputs else 0
