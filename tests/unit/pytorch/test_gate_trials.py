# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Trials before gates are placed: what they find does not depend on where a policy is put in force first."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from gated_calls import ELSEWHERE, IN_C  # noqa: E402

import xpuruntime.pytorch as xt  # noqa: E402
from xpuruntime.pytorch.overriding import gates, operator_gates  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("nothing_is_watched_afterwards")]

PRODUCTS = [{"match": {"op": "matmul", "m": 4096}, "use": "cpu.reference"}]
_CACHED = (gates.why_not_plain, gates.why_not_in_c, operator_gates._why_not_values, operator_gates._why_not_state)


@pytest.fixture
def untried(monkeypatch):
    monkeypatch.setattr(operator_gates, "_results", {})
    for one in _CACHED:
        one.cache_clear()
    yield
    for one in _CACHED:
        one.cache_clear()


def enter(x):
    with xt.kernel_policy(rules=[*ELSEWHERE, *PRODUCTS]):
        return x.sum()


def on_another_device():
    torch.set_default_device("meta")
    try:
        enter(torch.ones(3, device="cpu"))
    finally:
        torch.set_default_device(None)


def under_a_device():
    with torch.device("meta"):
        enter(torch.ones(3, device="cpu"))


def under_fake_tensors():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        enter(torch.ones(3))


def in_inference_mode():
    with torch.inference_mode():
        enter(torch.ones(3))


def under_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        enter(torch.ones(3))


PLACES = {
    "default device": on_another_device,
    "device": under_a_device,
    "fake tensors": under_fake_tensors,
    "inference mode": in_inference_mode,
    "autocast": under_autocast,
    "vmap": lambda: torch.vmap(enter)(torch.ones(2, 3)),
    "grad": lambda: torch.func.grad(enter)(torch.ones(3)),
    "jvp": lambda: torch.func.jvp(enter, (torch.ones(3),), (torch.ones(3),)),
    "functionalize": lambda: torch.func.functionalize(enter)(torch.ones(3)),
    "jit.trace": lambda: torch.jit.trace(enter, (torch.ones(3),), check_trace=False),
    "compile": lambda: torch.compile(enter, backend="eager")(torch.ones(3)),
}


@pytest.mark.usefixtures("untried")
@pytest.mark.filterwarnings("ignore:`torch.jit.trace", "ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("place", PLACES)
def test_a_first_policy_in_any_place_finds_what_this_pytorch_has(place):
    PLACES[place]()
    with xt.kernel_policy(rules=ELSEWHERE):
        pass
    assert [operator_gates.why_not(*one) for one in IN_C] == [""] * len(IN_C)
    assert gates.why_not_in_c() == ""
    assert gates.why_not_plain() == ""
