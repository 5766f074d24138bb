"""What a device remembers of rows follows from binds, grows and remaps."""
from __future__ import annotations

import pytest

from penstock.core.plan import NO_DRAM, NO_HBM, Bind, Group, Grow, Remap, RequestId, Row
from penstock.exec.step.tables import RowTables
from penstock.memory.dram import DramPool
from penstock.memory.hbm import HbmPool
from penstock.memory.pool import PageLayout

G, HBM, DRAM, ROWS = 4, 500, 9000, 70
LAYOUT = PageLayout(num_layers=2, num_kv_heads=2, page_size=G, head_dim=8)


def test_tables_follow_binds_grows_and_remaps():
    """Both columns; what is bound anew forgets what was there, also behind its end."""
    hbm, dram = (cls(LAYOUT, 40, base=base) for cls, base in ((HbmPool, HBM), (DramPool, DRAM)))
    tables = RowTables(2, 5 * G, [hbm], [dram], base=ROWS)
    [table] = tables.groups
    none = [-1] * 5

    def bind(pages, host=()):
        tables.bind(Bind(Row(ROWS + 1), RequestId(1), (tuple(HBM + p for p in pages),), 0,
                         (tuple(DRAM + p for p in host),) if host else ()), 7)

    bind([4, 3, 9])
    tables.grow(Grow(Row(ROWS + 1), Group(0), 3, (HBM + 1,), (DRAM + 8,)))
    assert table.device_RM.tolist() == [none, none], "nothing changes before it is applied"
    tables.edits.apply()
    assert table.device_RM.tolist() == [none, [4, 3, 9, 1, -1]]
    assert table.host_RM.tolist() == [none, [-1, -1, -1, 8, -1]]
    assert table.is_resident(1)
    tables.remap(Remap(Row(ROWS + 1), Group(0), (0, 3), (NO_HBM, NO_HBM), (DRAM + 7, DRAM + 8)))
    tables.edits.apply()
    assert table.device_RM.tolist() == [none, [-1, 3, 9, -1, -1]]
    assert table.host_RM.tolist() == [none, [7, -1, -1, 8, -1]]
    tables.remap(Remap(Row(ROWS + 1), Group(0), (3, 1), (HBM + 2, NO_HBM), (DRAM + 8, DRAM + 6)))
    tables.remap(Remap(Row(ROWS + 1), Group(0), (0,), (HBM + 4,), (NO_DRAM,)))
    tables.edits.apply()
    assert table.device_RM.tolist() == [none, [4, -1, 9, 2, -1]]
    assert table.host_RM.tolist() == [none, [-1, 6, -1, 8, -1]]
    assert not table.is_resident(1)
    tables.remap(Remap(Row(ROWS + 1), Group(0), (1,), (HBM + 3,), (DRAM + 6,)))
    assert table.is_resident(1)
    for row, entry in ((1, 4), (1, -1), (0, 0), (2, 0)):    # no such entry, not bound, no such row
        with pytest.raises(AssertionError, match="row"):
            tables.remap(Remap(Row(ROWS + row), Group(0), (entry,), (HBM + 4,), (NO_DRAM,)))
    with pytest.raises(AssertionError):                     # no such page
        tables.remap(Remap(Row(ROWS + 1), Group(0), (0,), (HBM + 40,), (NO_DRAM,)))
    tables.edits.apply()
    bind([5, NO_HBM - HBM], [30, 31])
    assert table.device_RM.tolist() == [none, [4, 3, 9, 2, -1]]
    tables.edits.apply()
    assert tables.last_R.tolist() == [0, 7, 0]
    assert table.device_RM.tolist() == [none, [5, -1, -1, -1, -1]]
    assert table.host_RM.tolist() == [none, [30, 31, -1, -1, -1]]
    for index, pages in ((1, 1), (3, 1), (2, 4)):       # a gap, an overlap, more than fit
        with pytest.raises(AssertionError):
            tables.grow(Grow(Row(ROWS + 1), Group(0), index, (HBM,) * pages))
