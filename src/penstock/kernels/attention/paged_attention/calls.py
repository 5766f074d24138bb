"""What the C of this op is called with."""
from __future__ import annotations

import ctypes


class Step(ctypes.Structure):
    """`Decode` of calls.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out")),
        *((name, ctypes.c_int64)
          for name in ("q_stride", "page_stride", "head_stride", "token_stride")),
        ("table", ctypes.c_void_p), ("table_stride", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("queries", "partial")),
        *((name, ctypes.c_int64)
          for name in ("num_queries", "num_chunks", "heads", "kv_heads", "page_size")),
        ("scale", ctypes.c_float), ("softcap", ctypes.c_float), ("window", ctypes.c_int64),
        ("sinks", ctypes.c_void_p), ("first", ctypes.c_int64),
        ("codes", ctypes.c_int64),
    )
