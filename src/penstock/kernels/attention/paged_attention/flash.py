"""flash-attn-4: attention of a step's prompts in one call, out of the pages. Imported where it is chosen.

It takes seconds to import and seconds more for each kind of model that it compiles for, so it is imported on
a thread while weights are read, and tried once for each kind. What does not import, compile or answer within
TRY_S is not used, with one line in the log: another way takes its place.
"""
from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from importlib import import_module, metadata
from typing import Any, TypeVar

import torch
from torch import Tensor

from penstock.config.base.errors import install_hint
from penstock.kernels.op import Unusable, WrongResult
from penstock.kernels.platform import Platform
from penstock.kernels.triton.lazy import is_alone

NAME, VERSION = "flash-attn-4", "4.0.0b36"
TRY_S = 60.0
TYPES, DIM_MAX = (torch.bfloat16, torch.float16), 256
# It compiles again where the queries of a row fit into one tile, and above so many rows. Lengths of a tile
# and less are called LONG, so that there is one kind; for many rows a second one is tried.
LONG, MANY = 256, 256

log = logging.getLogger("penstock.kernels")
T = TypeVar("T")


def check(platform: Platform) -> str:
    """Its version, and the import begins. Raises Unusable: it is not there, or not for this."""
    if "sm_90" not in platform.features:
        raise Unusable(f"{NAME} was tried on sm_90 only")
    try:
        found = metadata.version(NAME)
    except metadata.PackageNotFoundError:
        raise Unusable(f"{NAME} is not installed: {install_hint('cuda')}") from None
    if found != VERSION:
        raise Unusable(f"{NAME} {found} is installed and {VERSION} was tried: {install_hint('cuda')}")
    _flash.usable = True
    _flash.begin()
    return f"{NAME} {VERSION}"


def ready(heads: int, kv_heads: int, dim: int, dtype: torch.dtype, page_size: int | None = None,
          rows: int = 1) -> bool:
    """Whether `attend` of up to so many rows, or without a page size `attend_run`, works for such a model on
    the current device. The first call for a kind compiles."""
    if dtype not in TYPES or dim % 8 or dim > DIM_MAX or (is_alone() and _flash.usable):
        return False
    return _flash.tried((heads, kv_heads, dim, dtype, page_size, rows > MANY))


def attend(q_TNH: Tensor, k_PGKH: Tensor, v_PGKH: Tensor, *, scale: float, max_query: int, max_key: int,
           start_B1: Tensor, context_B: Tensor, table_BM: Tensor) -> Tensor:
    """out_TNH: the queries of several rows, each over its pages; the last query of a row sees all of its
    keys, each earlier one a key less.

    k, v_PGKH   dense in H        table_BM    int32: pages, dense in M, valid ones as far as the context goes
    start_B1    int32: row b has the queries [start[b], start[b + 1])     context_B   int32: its keys
    max_query, max_key   of any row, or more
    Capturable. Of what `ready` was asked for.
    """
    out_TNH: Tensor = _flash.function()(
        q_TNH, k_PGKH, v_PGKH, cu_seqlens_q=start_B1, max_seqlen_q=max(max_query, LONG), max_seqlen_k=max_key,
        seqused_k=context_B, page_table=table_BM, softmax_scale=scale, causal=True)[0]
    return out_TNH


def attend_run(q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, *, scale: float,
               causal: bool) -> tuple[Tensor, Tensor]:
    """(out_TNH, lse_NT f32, natural): the queries of one row over keys that lie one behind the other."""
    out, lse = _flash.function()(q_TNH[None], k_SKH[None], v_SKH[None], max_seqlen_q=max(len(q_TNH), LONG),
                                 softmax_scale=scale, causal=causal, return_lse=True)[:2]
    return out[0], lse[0]


def trial(device: torch.device, heads: int, kv_heads: int, dim: int, dtype: torch.dtype,
          page_size: int | None, many: bool) -> None:
    """Attends to three keys, whose values are 1, with NaN wherever a row may not look. Raises WrongResult.

    Where a page is a whole tile of keys, what lies behind a row's context is read and multiplied by zero:
    another request's NaN would stay in a page that went to this one.
    """
    q = torch.ones(3, heads, dim, dtype=dtype, device=device)
    kv = torch.full((3, kv_heads, 2, page_size or 3, dim), float("nan"), dtype=dtype, device=device)
    at = torch.arange(3, device=device)
    kv[at // (page_size or 3), :, :, at % (page_size or 3)] = 1.0
    k, v = (kv[:, :, plane].transpose(1, 2) for plane in (0, 1))
    if page_size is None:
        outs = [attend_run(q, k[0], v[0], scale=1.0, causal=causal)[0] for causal in (True, False)]
    else:
        outs = []
        for rows in (1, MANY + 1)[:1 + many]:       # of the rows one has queries
            start, context, table = (torch.tensor(x, dtype=torch.int32, device=device) for x in (
                [0] + [3] * rows, [3] + [1] * (rows - 1), [[0, 1, 2]] * rows))
            outs.append(attend(q, k, v, scale=1.0, max_query=3, max_key=3, start_B1=start, context_B=context,
                               table_BM=table))
    for out in outs:
        if not out.isfinite().all():
            raise WrongResult(f"what lies behind a row's context reaches its answer, in pages of {page_size}")
        if (out.float() - 1).abs().max() > 0.01:
            raise WrongResult("three equal keys differ")


class _Flash:
    """The function, and for which kinds of model it was tried. Thread-safe."""

    def __init__(self) -> None:
        self._lock, self._trying = threading.Lock(), threading.Lock()      # of the import, of trials
        self._import: Future[Callable[..., Any]] | None = None
        self._kinds: dict[tuple[object, ...], bool] = {}
        self.usable = False             # `check` has found it: who does without it has said so

    def begin(self) -> Future[Callable[..., Any]]:
        with self._lock:
            if self._import is None:
                # Of its compiler to its own authors.
                warnings.filterwarnings("ignore", category=UserWarning, module="cutlass")
                self._import = _aside(_imported)
            return self._import

    def function(self) -> Callable[..., Any]:
        return self.begin().result(TRY_S)

    def tried(self, kind: tuple[Any, ...]) -> bool:
        with self._trying:
            if kind not in self._kinds:
                self._kinds[kind] = self._try(*kind)
            return self._kinds[kind]

    def _try(self, *kind: Any) -> bool:
        device = torch.device("cuda", torch.cuda.current_device())

        def run() -> None:
            with torch.inference_mode():
                trial(device, *kind)

        try:
            self.function()
            _aside(run).result(TRY_S)
        except Exception as e:                  # a compiler's errors are of any kind
            why = f"{type(e).__name__}: {str(e).splitlines()[0][:200]}" if str(e) else type(e).__name__
            log.warning("%s is not used for prompts: %s", NAME, why)
            e.__traceback__ = None              # that of an import is kept, and would keep what callers had
            return False
        return True


def _imported() -> Callable[..., Any]:
    """One of its libraries marks functions for torch.compile, which would import all of that, and as long as
    all else takes; nothing is compiled so here, and a mark does nothing else."""
    marks: Any = torch.compiler.disable
    torch.compiler.disable = lambda fn=None, *_, **__: fn or (lambda fn: fn)
    try:
        found: Callable[..., Any] = import_module("flash_attn.cute.interface").flash_attn_varlen_func
        return found
    finally:
        torch.compiler.disable = marks


def _aside(work: Callable[[], T]) -> Future[T]:
    """`work` on a thread that is not joined at the end: a compiler that hangs cannot be stopped."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as e:
            done.set_exception(e)

    threading.Thread(target=run, daemon=True, name="penstock-flash").start()
    return done


_flash = _Flash()
