"""A turn of a core, with its flight recorder told of it as the engine's loop does."""
from __future__ import annotations

from collections.abc import Sequence

from penstock.core.plan import Advance, Event
from penstock.replay.recorder import Recorder


def recording(recorder: Recorder) -> Recorder:
    """Its core's `advance` does so from now on."""
    core, advance = recorder.core, recorder.core.advance

    def told(events: Sequence[Event]) -> Advance:
        recorder.begin(events)
        answer = advance(events)
        recorder.end(answer)
        return answer

    core.advance = told
    return recorder


def recorded(recorder: Recorder, events: Sequence[Event]) -> Advance:
    recorder.begin(events)
    answer = recorder.core.advance(events)
    recorder.end(answer)
    return answer
