"""The results of a step: append its tokens, put full pages into the prefix tree, end requests.

Most results are one more token of a row that decodes. While a row is below its `append_until` (see `schedule`) its
token is appended without further checks. Knows nothing of plans to come.
"""
from __future__ import annotations

from penstock.core import faults, schedule
from penstock.core.kv import sealing
from penstock.core.lifecycle import Phase, Trigger
from penstock.core.plan import Outcome, StepId, Token, make
from penstock.core.request import Request, ScheduledRow
from penstock.core.state import CoreState

_DONE, _SENDING = Phase.DONE, Phase.SENDING


def retire(core: CoreState, step: StepId, tokens: tuple[tuple[int, ...], ...]) -> None:
    assert step == core.kv.retired + 1, "results arrive in step order"
    core.kv.moves.retired = step
    rows, out, looked = core.in_flight.pop(step), core.out, 0
    if len(tokens) < len(rows):
        tokens = _of_each(rows, tokens)
    for row, new in zip(rows, tokens, strict=True):
        r = row.request
        at = r.retired
        if at < r.append_until and len(new) == 1:
            token = new[0]
            if token not in r.arrived.stop:
                r.num_placeholders -= 1
                r.retired = at = at + 1
                r.outputs.append(token)
                out.append(make(Token, (r.rid, at - r.num_prompt, token)))
                continue
        looked += 1
        _look(core, row, step, new)
    core.counters["rows_looked_at"] += looked


def _of_each(rows: list[ScheduledRow], tokens: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """Results of all rows of a step, also of those that do not sample."""
    results = iter(tokens)
    return tuple([next(results) if row.width else () for row in rows])


def _look(core: CoreState, row: ScheduledRow, step: StepId, new: tuple[int, ...]) -> None:
    r = row.request
    if r.phase is _DONE:
        return _counted(core, r, step, 0)      # over-run: issued before we knew that it had ended
    r.num_placeholders -= row.width
    if step <= r.invalid_through:
        return _counted(core, r, step, 0)      # it read what never came
    outcome = take(core, r, step, new)
    if row.kv_epoch == r.kv_epoch:
        short = row.width - len(new)           # what the plan allowed for and did not come
        assert short >= 0, "more tokens than the plan allows"
        r.computed -= short
        r.retired += row.count - short
        if r.retired >= (len(r.path) + 1) * core.cfg.page_size:
            sealing.seal(core.kv, r)         # before it may end: its pages serve others
        r.append_until = schedule.append_until(core, r)
        if r.origin.doubted and row.last and new:
            faults.succeeded(core, r)
    if outcome is not None:
        core.end(r, outcome)
    elif r.phase is _SENDING and not (r.num_output or core.kv.in_flight(r)):
        core.transition(r, Trigger.DROP)              # it came without its first token: once more


def _counted(core: CoreState, r: Request, step: StepId, tokens: int) -> None:
    for watcher in core.watchers:
        watcher.counted(r, step, tokens)


def take(core: CoreState, r: Request, step: StepId, tokens: tuple[int, ...]) -> Outcome | None:
    """Append output tokens of a step (0: of a prefill instance), as far as they count. Returns why the request ends
    with them."""
    a, first, outcome = r.arrived, r.num_output, None
    if core.prefills_only:
        r.outputs += tokens                     # the decode engine tells whom it concerns
        if r.forks and tokens:
            core.release_forks(r)
        if r.is_runnable:
            core.update_runnable(r)                      # it was dropped: now it must have its grant first
        return None
    n = first
    for token in tokens:
        r.outputs.append(token)
        core.out.append(make(Token, (a.rid, n, token)))
        n += 1
        if r.forks:
            core.release_forks(r)
        if token in a.stop and n > a.min_new:
            outcome = Outcome.STOP
            break
        if n >= r.max_new:
            outcome = Outcome.LENGTH
            break
    if outcome is not None or not step:
        _counted(core, r, step, n - first)
    return outcome


def delivered(core: CoreState, r: Request, tokens: tuple[int, ...]) -> None:
    """Decode role: a prefill engine has computed the prompt, and its KV is in our pages."""
    r.remote.delivered = r.num_prompt - r.retired
    if not r.started:
        core.started(r)
    r.restart(r.num_prompt)
    r.saving.is_done = True                     # it keeps what it has until it gets a row
    core.update_parked(r)
    core.update_runnable(r)
    sealing.seal(core.kv, r)
    if (outcome := take(core, r, StepId(0), tokens)) is not None:
        core.end(r, outcome)
