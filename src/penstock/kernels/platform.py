"""What torch offers on this machine, probed once."""
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

# Instruction sets whose presence changes which implementation is fast, in the order printed.
_FEATURES = ("avx2", "fma3", "avx512_f", "avx512_bf16", "avx512_vnni", "amx_bf16",
             "sve", "bf16", "i8mm")


class KernelError(ValueError):
    """A request to the kernels cannot be met: what was given, what is allowed, what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """The device kernels run on, as torch sees it."""

    device: str                         # "cpu" or "cuda"
    features: tuple[str, ...]           # instruction sets that matter here; of a GPU its "sm_90"
    torch: str                          # version
    cache: Path | None = None           # folder for what is compiled here; None keeps nothing
    gpu: str = ""                       # its name, of a GPU

    def best(self, *names: str) -> str:
        """The first of `names` that this device has, or 'no ' and the first."""
        return next((n for n in names if n in self.features), f"no {names[0]}")


_most = "native"
_LIMITS: dict[str, tuple[str, ...]] = {"native": _FEATURES, "avx2": ("avx2", "fma3"), "plain": ()}


def limit(isa: str) -> None:
    """From now on this process's kernels use no more of the CPU than `isa`: 'native', 'avx2' or 'plain'.
    For measuring on one machine what another would do; before anything is probed."""
    global _most
    assert isa in _LIMITS, isa
    _most = isa


def most() -> str:
    """The argument of the last `limit`."""
    return _most


def multiplies_bf16() -> bool:
    """Whether the CPU has instructions for it. Without them torch's products of bf16 take several times as
    long as those of f32 that it is converted to."""
    return _has("avx512_bf16", "amx_bf16", "bf16")


def has_tiles() -> bool:
    """Whether it multiplies tiles of bf16 (AMX), and the system lets this process have them. There
    torch's fused attention is faster than its products."""
    return _has("amx_bf16") and bool(torch.cpu._init_amx())


def _has(*features: str) -> bool:
    known = torch.cpu.get_capabilities()
    return any(known.get(f) for f in features if f in _LIMITS[_most])


def probe(device: str = "cpu", cache: Path | None = None) -> Platform:
    """Asks torch once. Raises KernelError for a device that no kernel here serves, and for one that
    is not there, with the reason."""
    if device == "cuda":
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
            major, minor = torch.cuda.get_device_capability()
        except (RuntimeError, AssertionError) as error:     # the latter: built without CUDA
            raise KernelError(f"device 'cuda': {str(error).splitlines()[0]}; take --device cpu") from None
        return Platform(device=device, features=(f"sm_{major}{minor}",), torch=torch.__version__,
                        cache=cache, gpu=torch.cuda.get_device_name())
    if device != "cpu":
        raise KernelError(f"device {device!r} has no kernels in this version: use 'cpu' or 'cuda'")
    known = torch.cpu.get_capabilities()
    return Platform(device=device, features=tuple(f for f in _LIMITS[_most] if known.get(f)),
                    torch=torch.__version__, cache=cache)
