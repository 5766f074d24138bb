"""How far a grant and a spill go: the classes that a grant passes at each end of a pair, the files of a spill.

    python tools/stops.py          prints both; a test holds the limits

A stop is a class that has the grant in its hands: as an argument, a local variable or a result of one of its methods,
alone or wrapped (Say, Received, PeerMessage, a list of them). Functions outside of classes count to the class that
calls them. Classes that only look on (`LOOKS_ON`) take no part in its way. The prefill instance ends where the
request has its grant. Files of a spill are those of src/penstock/core whose functions run in the turn that spills.
"""
from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).parents[1]
SOURCE = str(ROOT / "src/penstock") + "/"
LOOKS_ON = {"Recorder", "EventLog", "Timelines"}
INSIDE = ("what", "message", "outputs")     # fields of a wrapper that have what is wrapped


@contextmanager
def profiled(call: Callable[[FrameType, str, object], None]) -> Iterator[None]:
    """`call` for each call and return of a function, in this thread and those that begin meanwhile."""
    threading.setprofile(call)
    sys.setprofile(call)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)          # type: ignore[arg-type]


def holds(value: object, kinds: tuple[type, ...]) -> bool:
    if isinstance(value, kinds):
        return True
    if isinstance(value, list | tuple):
        return any(holds(x, kinds) for x in value[:8] if not isinstance(x, list | tuple))
    return any(holds(getattr(value, name), kinds) for name in INSIDE if name in getattr(type(value), "__slots__", ()))


def owner(frame: FrameType | None) -> str:
    """The class whose method this is, or which has called this function."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(SOURCE) and (this := frame.f_locals.get("self")) is not None:
            return type(this).__name__
        frame = frame.f_back
    return ""


def of_a_grant() -> tuple[list[str], list[str]]:
    """Classes in the order in which they first have it: of the decode, and of the prefill instance."""
    sys.path[:0] = [str(ROOT / "tests/doubles"), str(ROOT / "tests")]
    from pair_engines import PairOfEnds
    from pipeline_engine import checkpoint

    from penstock.core.pair.messages import Grant
    from penstock.core.pair.protocol import Granted
    seen: list[str] = []
    decode: list[list[str]] = []
    senders: set[object] = set()                  # threads and frames of the decode instance

    def note(frame: FrameType | None, result: object = None) -> None:
        if frame is None or not frame.f_code.co_filename.startswith(SOURCE):
            return
        if not any(holds(value, (Grant, Granted)) for value in [*frame.f_locals.values(), result]):
            return
        name, thread = owner(frame), threading.get_ident()
        if name == "PairReader" and not decode:
            decode.append(seen.copy())
            seen.clear()
            sending: FrameType | None = sys._current_frames()[threading.main_thread().ident or 0]
            while sending is not None:
                senders.add(sending)
                sending = sending.f_back
        if decode and (thread in senders or frame in senders):
            return                              # what the decode instance does when it has sent it
        if threading.current_thread() is not threading.main_thread() and not decode:
            senders.add(thread)
        if name not in LOOKS_ON and name not in seen:
            seen.append(name)

    def look(frame: FrameType, event: str, result: object) -> None:
        if event == "call" and isinstance(frame.f_locals.get("self"), Grant):
            seen.append(owner(frame.f_back))    # it makes it
        elif event in ("call", "return"):
            if event == "call":
                note(frame.f_back)              # who calls has it too
            note(frame, result if event == "return" else None)

    with tempfile.TemporaryDirectory() as folder:
        with profiled(look), PairOfEnds(checkpoint(Path(folder)), Path(folder), kv_cache_memory_bytes="4M") as pair:
            pair.decode.submit([n % 97 for n in range(40)], 2)
            pair.finish()
    return decode[0], seen


def of_a_spill() -> list[str]:
    """Files of the core that run in the turn in which a request of 200 tokens is spilled."""
    from penstock.core.core import Core
    from penstock.core.plan import Arrived, Event, Moved, RequestId, Retired, Spilled
    from penstock.core.settings import CoreConfig
    core = Core(CoreConfig(page_size=4, rows=2, hbm_pages=80, dram_pages=80, step_tokens=64, max_len=300, budget=16,
                           hot_pages=5))
    events: list[Event] = [Arrived(RequestId(1), tuple(range(200)), 90, selects=True)]
    for _ in range(12):
        plan = core.advance(events).plan
        events = [] if plan is None else [Retired(plan.step, tuple((7,) for samples in plan.samples if samples)),
                                          *(Moved(move.id, True) for move in plan.moves)]
    files: dict[str, None] = {}

    def look(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(SOURCE + "core/"):
            files.setdefault(frame.f_code.co_filename.removeprefix(SOURCE))

    with profiled(look):
        core.advance([*events, Spilled(RequestId(1))])
    assert core.counters["spills"] == 1, "nothing was spilled"
    return sorted(files)


def main() -> None:
    decode, prefill = of_a_grant()
    print(f"a grant, decode instance: {len(decode)} stops: {' > '.join(decode)}")
    print(f"a grant, prefill instance: {len(prefill)} stops: {' > '.join(prefill)}")
    files = of_a_spill()
    print(f"a spill: {len(files)} files: {' '.join(files)}")


if __name__ == "__main__":
    main()
