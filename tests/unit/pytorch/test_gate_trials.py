# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Trials before gates are placed: what they find does not depend on where a policy is put in force first."""

from __future__ import annotations

import gc
import weakref

import pytest

torch = pytest.importorskip("torch")

from gated_calls import ELSEWHERE, IN_C  # noqa: E402

import xpuruntime.pytorch as xt  # noqa: E402
from xpuruntime import _core  # noqa: E402
from xpuruntime.pytorch.overriding import gates, operator_gates, operator_trials  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("nothing_is_watched_afterwards")]

PRODUCTS = [{"match": {"op": "matmul", "m": 4096}, "use": "cpu.reference"}]
_CACHED = (
    gates.why_no_layout,
    gates.why_not_plain,
    gates.why_not_in_c,
    operator_gates._why_not_values,
    operator_gates._why_not_state,
)


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
}
if torch.__version__ >= (2, 13):  # Dynamo makes no policy before that
    PLACES["compile"] = lambda: torch.compile(enter, backend="eager")(torch.ones(3))


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("place", PLACES)
def test_a_first_policy_in_any_place_finds_what_this_pytorch_has(place):
    PLACES[place]()
    with xt.kernel_policy(rules=ELSEWHERE):
        pass
    assert [operator_gates.why_not(*one) for one in IN_C] == [""] * len(IN_C)
    assert gates.why_not_in_c() == ""
    assert gates.why_not_plain() == ""


def broken(*_):
    raise AttributeError("there is no such thing here")


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize(
    ("where", "name"),
    [
        (_core, "open_torch"),
        (_core, "open_torch_values"),
        (_core, "open_tensor_layout"),
        (_core, "open_torch_state"),
        (_core, "place_raising_kernel"),
        (operator_trials, "_numbers"),
    ],
)
def test_where_a_trial_itself_fails_other_ways_serve_and_it_is_said(where, name, monkeypatch):
    x = torch.randn(3, 8)
    expected = torch.mm(x, x.T), torch.nn.functional.layer_norm(x, (8,))
    with monkeypatch.context() as patched:
        patched.setattr(where, name, broken)
        with xt.kernel_policy(rules=[*ELSEWHERE, *PRODUCTS]):
            for _ in range(3):
                found = torch.mm(x, x.T), torch.nn.functional.layer_norm(x, (8,))
                assert all(map(torch.equal, found, expected))
        said = [operator_gates.why_not(*one) for one in IN_C]
    assert all("AttributeError: there is no such thing here" in one for one in said)


@pytest.mark.usefixtures("untried")
def test_where_the_dispatcher_cannot_be_tried_the_ways_before_it_serve_and_it_is_said(monkeypatch):
    monkeypatch.setattr(_core, "open_torch_dispatcher", broken)
    assert "AttributeError: there is no such thing here" in gates.why_not_plain()
    monkeypatch.undo()
    gates.why_not_plain.cache_clear()
    monkeypatch.setattr(_core, "place_trial", broken)
    assert "AttributeError: there is no such thing here" in gates.why_not_plain()
    with xt.kernel_policy(rules=PRODUCTS):
        assert torch.equal(torch.mm(torch.eye(3), torch.eye(3)), torch.eye(3))


def test_nothing_is_left_of_results_where_python_gives_others_than_tensors():
    assert operator_gates._why_not_values() == ""
    library = torch.library.Library("_xpuruntime_results", "DEF")
    library.define(
        "passes(Tensor a, Tensor? b, Tensor? c, SymInt[] d, float e, float? f, float? g, bool h, bool[3] i)"
        " -> (Tensor, Tensor, Tensor)"
    )
    made = []

    def kernel(*_):
        result = torch.ones(3)
        made.append(weakref.ref(result))
        return result, "no tensor", result

    remove = _core.place_probe("_xpuruntime_results", kernel)
    try:
        with pytest.raises(TypeError, match="a tensor is expected"):
            torch.ops._xpuruntime_results.passes(
                torch.ones(2), None, None, [5], 0.5, None, 0.25, True, [True, False, True]
            )
    finally:
        remove()
        library._destroy()
    gc.collect()
    assert [one() for one in made] == [None]
