"""The choice of implementations: by preference, by name, and never a silent fallback."""
from __future__ import annotations

import gc
import os
import weakref

import pytest
import torch

from penstock.config.base.machine import limit_libraries
from penstock.kernels import registry
from penstock.kernels.gemm import linear
from penstock.kernels.op import Implementation, Op, Unusable
from penstock.kernels.platform import KernelError, Platform, limit, most, probe

HERE = Platform(device="cpu", features=("avx2",), torch="0")


def broken(_: Platform) -> str:
    raise Unusable("it is missing")


def fine(platform: Platform) -> str:
    return platform.best("amx_bf16", "avx2")


@pytest.fixture
def two(monkeypatch):
    """An op whose fastest implementation cannot run."""
    op = Op("act", (Implementation("fast", None, broken), Implementation("slow", None, fine),
                    Implementation("reference", None, fine)))
    monkeypatch.setattr(registry, "OPS", {"act": op})


def test_what_will_not_run_is_not_probed(two):
    assert registry.choose(HERE, ops=()) == {}
    with pytest.raises(KernelError, match="no op 'act'"):
        registry.choose(HERE, {"act": "reference"}, ops=())


def test_first_usable_is_chosen_and_the_line_says_why(two):
    choice = registry.choose(HERE)["act"]
    assert choice.name == "slow"
    assert str(choice) == "act: slow (avx2); fast skipped: it is missing; reference usable"


def test_a_requested_name_wins(two):
    choice = registry.choose(HERE, {"act": "reference"})["act"]
    assert (choice.name, choice.reason) == ("reference", "avx2, requested")


@pytest.mark.parametrize("requested, said", [
    ({"act": "fast"}, "act=fast cannot run here: it is missing; use one of slow, reference"),
    ({"act": "magic"}, "act has no implementation 'magic': use one of fast, slow, reference"),
    ({"swim": "fast"}, "there is no op 'swim' to choose an implementation for: use one of act"),
])
def test_a_request_that_cannot_be_met_is_an_error(two, requested, said):
    with pytest.raises(KernelError, match=f"^{said}$"):
        registry.choose(HERE, requested)


def test_every_op_has_a_choice_on_this_machine():
    choices = registry.choose(probe())
    assert set(choices) == set(registry.OPS)
    for name, choice in choices.items():
        assert choice.name in registry.OPS[name].names and choice.reason


@pytest.mark.parametrize("op", [name for name, op in registry.OPS.items() if "c" in op.names])
def test_kernels_in_c_have_their_old_name_for_one_release(op):
    here = probe()
    try:
        registry.OPS[op].get("c").usable_on(here)
    except Unusable as why:
        pytest.skip(str(why))
    new, old = (registry.choose(here, {op: name}, (op,))[op] for name in ("c", "native"))
    assert new == old and old.name == "c"


def test_reference_alone_when_nothing_else_is_asked():
    requested = dict.fromkeys(registry.OPS, "reference")
    assert {c.name for c in registry.choose(probe(), requested).values()} == {"reference"}


def test_probe_refuses_a_device_without_kernels():
    with pytest.raises(KernelError, match="'tpu' has no kernels"):
        probe("tpu")


def test_onednn_lets_go_of_the_weight_it_packed():
    weight = torch.randn(40, 24)
    x = torch.randn(2, 24)
    want = x @ weight.t()
    gone = weakref.ref(weight)
    packed = linear.pack(weight, backend="onednn")
    del weight
    gc.collect()
    assert gone() is None
    torch.testing.assert_close(packed(x), want)


@pytest.mark.parametrize("weight, bias", [
    (torch.zeros(4, dtype=torch.float32), None),
    (torch.zeros(4, 4, dtype=torch.float64), None),
    (torch.zeros(4, 4), torch.zeros(3)),
    (torch.zeros(4, 4), torch.zeros(4, dtype=torch.bfloat16)),
])
def test_linear_refuses_what_it_does_not_declare(weight, bias):
    with pytest.raises(KernelError):
        linear.pack(weight, bias, backend="reference")


def test_less_of_the_cpu_may_be_used(monkeypatch):
    monkeypatch.setattr("penstock.kernels.platform._most", "native")
    whole = probe().features
    for isa, kept in (("avx2", {"avx2", "fma3"}), ("plain", set())):
        limit(isa)
        assert most() == isa and set(probe().features) == kept & set(whole)
    for name in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS"):
        monkeypatch.setenv(name, "unset")
    limit_libraries("native")
    assert os.environ["ATEN_CPU_CAPABILITY"] == "unset"
    limit_libraries("avx2")
    assert (os.environ["ATEN_CPU_CAPABILITY"], os.environ["ONEDNN_MAX_CPU_ISA"],
            os.environ["MKL_ENABLE_INSTRUCTIONS"]) == ("avx2", "AVX2", "AVX2")
