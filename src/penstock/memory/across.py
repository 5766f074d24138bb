"""What CUDA's driver does and torch does not, by ctypes: device memory that another process of this machine sees
too, and copies of what lies in equal distances.

Owns allocations outside of torch's, whose blocks have no handles of their own. Who reads or writes another's waits
until that has happened before it tells anybody: the other process knows no order of streams.
"""
from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_OUT_OF_MEMORY = 2
_AT_LEAST, _INT32 = 0, (1 << 32) - 1
_OF_HOST, _OF_DEVICE = 1, 2


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_byte * HANDLE_BYTES),)


class _Side(ctypes.Structure):
    _fields_ = (("x", ctypes.c_size_t), ("y", ctypes.c_size_t), ("kind", ctypes.c_uint), ("host", ctypes.c_void_p),
                ("device", ctypes.c_uint64), ("array", ctypes.c_void_p), ("pitch", ctypes.c_size_t))


class _Copy2D(ctypes.Structure):
    _fields_ = (("source", _Side), ("target", _Side), ("width", ctypes.c_size_t), ("height", ctypes.c_size_t))


class Rows(NamedTuple):
    """So many rows of `width` bytes, from `source` to `target`: addresses, and bytes from a row to the next."""

    target: int
    source: int
    target_pitch: int
    source_pitch: int
    width: int
    height: int


class TensorMemory:
    """What torch makes a tensor of, and keeps as long as that; it ends with this."""

    def __init__(self, address: int, nbytes: int, end: str, device: int) -> None:
        self.address, self._end, self._device = address, end, device
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False),
                                         "version": 3}

    def __del__(self) -> None:
        try:
            with torch.cuda.device(self._device):
                getattr(_driver(), self._end)(ctypes.c_uint64(self.address))
        except (AttributeError, RuntimeError, TypeError):
            pass                        # the interpreter or the device has gone, and with it the memory


def allocated(nbytes: int) -> tuple[Tensor, bytes]:
    """uint8 [nbytes] on the current device, not cleared, and the handle by which another process opens it.
    Raises torch's OutOfMemoryError."""
    found, handle, device = ctypes.c_uint64(), _Handle(), _current()
    _check(_driver().cuMemAlloc_v2(ctypes.byref(found), nbytes), f"{nbytes} bytes")
    memory = TensorMemory(found.value, nbytes, "cuMemFree_v2", device)
    _check(_driver().cuIpcGetMemHandle(ctypes.byref(handle), found), "a handle")
    return torch.as_tensor(memory, device=f"cuda:{device}"), bytes(handle)


def opened(handle: bytes, nbytes: int, device: int) -> Tensor:
    """The same bytes in another process, which sees their device under this number."""
    return torch.as_tensor(reached(handle, nbytes, device), device=f"cuda:{device}")


def reached(handle: bytes, nbytes: int, device: int) -> TensorMemory:
    """The same bytes, for kernels of this device: theirs may be one that this process does not see. Raises
    RuntimeError where that cannot be."""
    found = ctypes.c_uint64()
    with torch.cuda.device(device):
        _current()
        _check(_driver().cuIpcOpenMemHandle_v2(
            ctypes.byref(found), _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS), "another's memory")
        return TensorMemory(found.value, nbytes, "cuIpcCloseMemHandle", device)


def write(address: int, x: Tensor, stream: int) -> None:
    """Copy dense `x` there, on this stream: memory of this device, or of another that `reached` has."""
    _check(_driver().cuMemcpyAsync(address, x.data_ptr(), x.nbytes, stream), "a copy to another's memory")


def rows_of(target: Tensor, source: Tensor) -> Iterator[Rows]:
    """What copies one of two tensors of one shape and type into the other: the fewest rectangles of bytes, whose
    elements follow each other in both from some dimension on."""
    dims = [(n, t, s) for n, t, s in zip(target.shape, target.stride(), source.stride(), strict=True) if n != 1]
    width = target.itemsize
    while dims and dims[-1][1:] == (width // target.itemsize,) * 2:
        width *= dims.pop()[0]
    merged: list[tuple[int, int, int]] = []         # of rows: how many, and bytes from one to the next in both
    for n, t, s in reversed(dims):
        step = t * target.itemsize, s * target.itemsize
        if merged and step == (merged[-1][0] * merged[-1][1], merged[-1][0] * merged[-1][2]):
            merged[-1] = n * merged[-1][0], *merged[-1][1:]
        else:
            merged.append((n, *step))
    height, down, up = merged[0] if merged else (1, width, width)
    starts = [(target.data_ptr(), source.data_ptr())]
    for n, t, s in reversed(merged[1:]):
        starts = [(a + i * t, b + i * s) for a, b in starts for i in range(n)]
    return (Rows(a, b, down, up, width, height) for a, b in starts)


def copy_rows(target: Tensor, source: Tensor, stream: int) -> None:
    """Copy `source` into `target`, of one shape and type, on this stream: one on a device, the other in pinned host
    memory or on a device as well, each of which may have gaps. torch would make the host's side dense first, in
    memory that is not pinned. Raises OSError."""
    assert target.shape == source.shape and target.dtype == source.dtype, "copies of unlike tensors"
    if not target.numel():
        return
    for rows in rows_of(target, source):
        found = _Copy2D(width=rows.width, height=rows.height)
        for side, x, address, pitch in ((found.target, target, rows.target, rows.target_pitch),
                                        (found.source, source, rows.source, rows.source_pitch)):
            side.kind, side.pitch = _OF_DEVICE if x.is_cuda else _OF_HOST, pitch
            side.host, side.device = (None, address) if x.is_cuda else (address, 0)
        if code := _driver().cuMemcpy2DAsync_v2(ctypes.byref(found), stream):
            raise OSError(f"CUDA's driver, a copy of {rows.height} rows of {rows.width} bytes: error {code}")


def flag(address: int, value: int, stream: int) -> None:
    """Write an int32 there, behind what this stream does before: who has waited for it sees all of that."""
    _check(_driver().cuStreamWriteValue32_v2(stream, address, value & _INT32, 0), "a flag in another's memory")


def wait_flag(address: int, value: int, stream: int) -> None:
    """What this stream does from now on waits until the int32 there is `value`, or has gone past it."""
    _check(_driver().cuStreamWaitValue32_v2(stream, address, value & _INT32, _AT_LEAST), "a wait for a flag")


def _current() -> int:
    """The current device, whose context is this thread's when this returns."""
    torch.cuda.synchronize()
    return torch.cuda.current_device()


@functools.cache
def _driver() -> Any:
    driver = ctypes.CDLL("libcuda.so.1")        # found by its name, as torch has loaded it
    driver.cuMemAlloc_v2.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    driver.cuIpcGetMemHandle.argtypes = (ctypes.c_void_p, ctypes.c_uint64)
    driver.cuIpcOpenMemHandle_v2.argtypes = (ctypes.c_void_p, _Handle, ctypes.c_uint)
    for name in ("cuStreamWriteValue32_v2", "cuStreamWaitValue32_v2"):
        getattr(driver, name).argtypes = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint
    driver.cuMemcpy2DAsync_v2.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    driver.cuMemcpyAsync.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
    return driver


def _check(code: int, what: str) -> None:
    if code == _OUT_OF_MEMORY:
        raise torch.OutOfMemoryError(f"CUDA out of memory: {what}")
    if code:
        raise RuntimeError(f"CUDA's driver, {what}: error {code}")
