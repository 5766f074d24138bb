"""What a selection always keeps and what it scores, as a function of the query's position alone."""
from __future__ import annotations

from dataclasses import dataclass

MOST, LEAST = 0.75, 0.25    # what the most and the least that q.k can be in a unit count in its score


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectRule:
    """Tokens all three. `unit` tokens of one KV head are chosen together.

    sink     the units that hold the first `sink` tokens are always kept; 0: none
    window   the units that hold the query's last `window` tokens, itself included, are; >= 1
    """

    unit: int
    sink: int
    window: int

    def __post_init__(self) -> None:
        assert self.unit >= 1 and self.sink >= 0 and self.window >= 1, f"{self}"

    @property
    def sink_units(self) -> int:
        return -(-self.sink // self.unit)

    @property
    def least_units(self) -> int:
        """The smallest budget: sinks, the most units that a window touches, one that is scored."""
        return self.sink_units + (self.window + self.unit - 2) // self.unit + 2

    def scored(self, position: int) -> tuple[int, int]:
        """Units [first, end) that a query at `position` scores; all before and after, up to its own,
        are kept. Each is full and ends before the window, so no later key can be in one."""
        end = max(0, position + 1 - self.window) // self.unit
        return min(self.sink_units, end), end
