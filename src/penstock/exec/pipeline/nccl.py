"""NCCL's sums and gathers, of the library that torch has loaded. torch's own binding of them cannot join
processes (2.11), and its process groups bring a thread that asks about work inside captures."""
from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from penstock.config.base.errors import ConfigError

ID_BYTES = 128
_KINDS = {torch.float16: 6, torch.float32: 7, torch.float64: 8, torch.bfloat16: 9}
_SUM = 0
_INVALID_USAGE = 5


class _Id(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * ID_BYTES),)


def _library() -> ctypes.CDLL:
    """Raises ConfigError."""
    try:
        lib = ctypes.CDLL("libnccl.so.2")       # found by its name, as torch has loaded it
    except OSError as e:
        raise ConfigError(f"TP ranks on GPUs of their own add by NCCL, which torch has not loaded here ({e}): "
                          "install torch with CUDA from pip's default index") from None
    p, n, i = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for name, given in (("ncclGetUniqueId", (p,)), ("ncclCommInitRank", (p, i, _Id, i)),
                        ("ncclAllReduce", (p, p, n, i, i, p, p)), ("ncclAllGather", (p, p, n, i, p, p))):
        getattr(lib, name).argtypes = given
        getattr(lib, name).restype = i
    lib.ncclGetErrorString.restype = ctypes.c_char_p
    return lib


def unique_id() -> bytes:
    """By which the ranks of one communicator find each other: of one of them, told to all."""
    lib, found = _library(), _Id()
    _check(lib, lib.ncclGetUniqueId(ctypes.byref(found)))
    return bytes(found.internal)


class Communicator:
    """Of processes with a GPU each, the current one. What it does is launched on the current stream, and
    captured with it. All ranks call the same in the same order. Raises RuntimeError, with NCCL's words."""

    def __init__(self, unique: bytes, rank: int, size: int) -> None:
        """Returns when all have come."""
        self._lib, self._size, self._comm = _library(), size, ctypes.c_void_p()
        torch.cuda.current_stream()             # makes the context
        _check(self._lib, self._lib.ncclCommInitRank(
            ctypes.byref(self._comm), size, _Id.from_buffer_copy(unique), rank))

    def all_reduce(self, x: Tensor) -> None:
        """The sum over the ranks, in place."""
        whole = x.contiguous()
        _check(self._lib, self._lib.ncclAllReduce(
            whole.data_ptr(), whole.data_ptr(), whole.numel(), _KINDS[x.dtype], _SUM, self._comm, _stream()))
        if whole is not x:
            x.copy_(whole)

    def gather(self, x: Tensor) -> Tensor:
        """[ranks, ...] of all."""
        own, found = x.contiguous(), x.new_empty(self._size, *x.shape)
        _check(self._lib, self._lib.ncclAllGather(
            own.data_ptr(), found.data_ptr(), own.numel(), _KINDS[x.dtype], self._comm, _stream()))
        return found


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def _check(lib: ctypes.CDLL, code: int) -> None:
    if code:
        why = ": each rank needs a GPU of its own, and all the same NCCL" if code == _INVALID_USAGE else ""
        raise RuntimeError(f"NCCL: {lib.ncclGetErrorString(code).decode()}{why}")
