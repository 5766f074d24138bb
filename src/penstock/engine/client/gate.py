"""Work of many requests, a little in each turn of the event loop, so that streams with text go first.

A turn ends with what its streams have to write. Were 256 requests that come at once taken in one, no stream
would get a token for the .1 s that this takes. Knows nothing of what it runs.
"""
from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

# Beside one piece in any case, one for so long a turn: of a loop that is busy with text a part is left for
# those who come. A request costs about .3 ms, over several turns.
PIECE_S = .001
PIECES_MAX = 8


class Gate:
    """Pieces of work in the order in which they came, on one event loop."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._last = 0.0                # when the turn before began; meaningless while none waits

    def later(self, work: Callable[[], None]) -> None:
        """Run it in this turn or a later one. The loop's handler gets what it raises."""
        if not self._waiting:
            self._last = time.thread_time()
            asyncio.get_running_loop().call_soon(self._turn)
        self._waiting.append(work)

    def _turn(self) -> None:
        now = time.thread_time()
        pieces, self._last = min(PIECES_MAX, 1 + int((now - self._last) / PIECE_S)), now
        try:
            for _ in range(min(pieces, len(self._waiting))):
                self._waiting[0]()
                self._waiting.popleft()
        except BaseException:
            self._waiting.popleft()
            raise
        finally:
            if self._waiting:
                asyncio.get_running_loop().call_soon(self._turn)
