"""A limit of addresses (ulimit -v): memory counts as free only as far as it goes, and failures name it."""
from __future__ import annotations

import errno
import subprocess
import sys

import pytest

from penstock.config.base import machine
from penstock.config.base.machine import address_limit, probe, why_no_memory

TORCH = RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate "
                     "memory: you tried to allocate 6442450944 bytes. Error code 12 (Cannot allocate memory)")
NO_MEMORY = (TORCH, MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory"),
             RuntimeError("unable to mmap 100 bytes from file <x>: Cannot allocate memory (12)"))
NO_ADDRESSES = (RuntimeError("can't start new thread"),
                ImportError("libtorch_cpu.so: failed to map segment from shared object"))
OTHERS = (RuntimeError("shape mismatch"), ImportError("no module"), OSError(errno.EACCES, "no"), KeyError())


def test_free_memory_is_what_the_limit_leaves():
    code = ("import resource; resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30));"
            "from penstock.config.base.machine import probe; print(probe().memory_available)")
    free = int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout)
    assert min(probe().memory_available, 2 << 30) <= free < 3 << 30


def test_refusal_of_more_than_is_free_names_the_limit_where_that_is_the_cause():
    code = ("import resource; resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30));"
            "from penstock.config.base.machine import probe;"
            "from penstock.config.settings.cli import from_options;"
            "from penstock.config.settings.resolve import resolve;"
            "resolve(from_options('demo', {'hbm_bytes': 1 << 50}), probe())")
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr
    assert "are free here; ulimit -v 3145728 lets each process have 3.00 GiB of addresses: raise it" in said
    assert probe().limit == probe().words["limit"] == ""


@pytest.mark.parametrize("error", NO_MEMORY, ids=lambda e: type(e).__name__)
def test_failed_allocation_without_a_limit_names_the_flags(error):
    assert "--kv-cache-memory-bytes" in why_no_memory(error)


@pytest.mark.parametrize("error", (*NO_MEMORY, *NO_ADDRESSES), ids=lambda e: type(e).__name__)
def test_failed_allocation_under_a_limit_names_it(error, monkeypatch):
    monkeypatch.setattr(machine.resource, "getrlimit", lambda which: (3_000_000 << 10, -1))
    assert "ulimit -v 3000000 lets each process have 2.86 GiB" in why_no_memory(error)
    assert why_no_memory(TORCH).startswith("6.00 GiB could not be allocated")


def test_other_errors_are_not_of_memory():
    assert [why_no_memory(e) for e in OTHERS] == [None] * len(OTHERS)
    assert why_no_memory(NO_ADDRESSES[0]) is None and address_limit() == ""
