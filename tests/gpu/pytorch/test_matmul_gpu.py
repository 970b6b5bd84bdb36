# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""PyTorch's matrix products on CUDA under a policy: our cuBLAS kernels, pinned algorithms, skinny products, graphs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

import xpuruntime as xrt
import xpuruntime.pytorch as xt
from xpuruntime.errors import UnsupportedOperationError, XpuRuntimeWarning
from xpuruntime.pytorch.dispatch import tuning
from xpuruntime.pytorch.dispatch.context import CONTEXT, active_policy
from xpuruntime.pytorch.dispatch.overrides.registry import installed

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("no_policy_is_left")

aten = torch.ops.aten
LT = "cublas.cublasLt"
#: The largest error of one element, as a part of the largest element of the exact result.
CLOSE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def strict(matmul: Any = None, rules: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    kernels: dict[str, Any] = {} if matmul is None else {"matmul": matmul}
    if rules:
        kernels["rules"] = rules
    return {"schema": "xpuruntime.policy/1", "mode": "strict", "kernels": kernels}


def served() -> set[str]:
    return {decision.chosen for decision in xrt.decisions()}


def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.float64).to(dtype)


def assert_close(found: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    error = (found.double() - exact).abs().max() / exact.abs().max()
    assert error <= CLOSE[dtype], float(error)


FORMS: dict[str, Callable[[torch.dtype], tuple[Any, tuple[torch.Tensor, ...], dict[str, Any]]]] = {
    "mm": lambda t: (aten.mm.default, (made(128, 64, dtype=t), made(64, 96, dtype=t)), {}),
    "mm_transposed": lambda t: (aten.mm.default, (made(64, 128, dtype=t).t(), made(96, 64, dtype=t).t()), {}),
    "mm_expanded": lambda t: (aten.mm.default, (made(1, dtype=t).expand(128, 64), made(64, 96, dtype=t)), {}),
    "mm_odd": lambda t: (aten.mm.default, (made(7, 13, dtype=t), made(13, 5, dtype=t)), {}),
    "bmm": lambda t: (aten.bmm.default, (made(6, 32, 64, dtype=t), made(6, 64, 48, dtype=t)), {}),
    "bmm_shared": lambda t: (aten.bmm.default, (made(6, 32, 64, dtype=t), made(64, 48, dtype=t).expand(6, 64, 48)), {}),
    "addmm_row": lambda t: (
        aten.addmm.default,
        (made(96, dtype=t), made(128, 64, dtype=t), made(64, 96, dtype=t)),
        {},
    ),
    "addmm_full": lambda t: (
        aten.addmm.default,
        (made(128, 96, dtype=t), made(128, 64, dtype=t), made(64, 96, dtype=t)),
        {"beta": 0.5, "alpha": 2},
    ),
    "baddbmm": lambda t: (
        aten.baddbmm.default,
        (made(6, 32, 48, dtype=t), made(6, 32, 64, dtype=t), made(6, 64, 48, dtype=t)),
        {"beta": 0, "alpha": 0.125},
    ),
}


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("kernel", ["cublas.cublas", LT])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_exact_and_looks_as_pytorchs(form: str, kernel: str, dtype: torch.dtype) -> None:
    op, args, more = FORMS[form](dtype)
    native = op(*args, **more)
    exact = op(*(arg.double() for arg in args), **more)
    xrt.clear_decisions()
    with xt.kernel_policy(strict(kernel)):
        found = op(*args, **more)
        into = getattr(aten, op._schema.name.removeprefix("aten::")).out
        out = torch.empty_like(native)
        into(*args, **more, out=out)
    assert served() == {kernel}
    assert (found.dtype, found.shape, found.stride()) == (native.dtype, native.shape, native.stride())
    assert_close(found, exact, dtype)
    assert_close(out, exact, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_result_in_float32_from_16_bits(dtype: torch.dtype) -> None:
    a, b, c = made(64, 128, dtype=dtype), made(128, 96, dtype=dtype), made(64, 96, dtype=torch.float32)
    with xt.kernel_policy(strict(LT)):
        product = aten.mm.dtype(a, b, torch.float32)
        batch = aten.bmm.dtype(a[None], b[None], torch.float32)
        total = aten.addmm.dtype(c, a, b, torch.float32)
    assert served() == {LT}
    exact = a.double() @ b.double()
    for found, expected in ((product, exact), (batch[0], exact), (total, exact + c.double())):
        assert found.dtype == torch.float32
        assert_close(found, expected, torch.float32)


@pytest.mark.parametrize("use_gelu", [False, True])
def test_a_product_with_its_activation(use_gelu: bool) -> None:
    bias, a, b = made(96), made(128, 64), made(64, 96)
    native = aten._addmm_activation(bias, a, b, use_gelu=use_gelu)
    with xt.kernel_policy(strict(LT)):
        found = aten._addmm_activation(bias, a, b, use_gelu=use_gelu)
    assert served() == {LT}
    assert_close(found, native.double(), torch.bfloat16)


def test_float8_with_scales() -> None:
    a, b = made(64, 128, dtype=torch.float8_e4m3fn), made(96, 128, dtype=torch.float8_e4m3fn).t()
    scales = torch.tensor(0.5, device="cuda"), torch.tensor(2.0, device="cuda")
    exact = (a.float() * scales[0]).double() @ (b.float() * scales[1]).double()
    with xt.kernel_policy(strict(LT)):
        found = torch._scaled_mm(a, b, *scales, out_dtype=torch.bfloat16)
    assert served() == {LT}
    assert_close(found, exact, torch.bfloat16)
    rows = torch.ones(64, 1, device="cuda"), torch.ones(1, 96, device="cuda")
    with xt.kernel_policy(matmul=LT), pytest.warns(XpuRuntimeWarning, match="one scale for each matrix"):
        torch._scaled_mm(a, b, *rows, out_dtype=torch.bfloat16)


def test_tf32_follows_pytorchs_switch_from_call_to_call() -> None:
    a, b = made(256, 256, dtype=torch.float32), made(256, 256, dtype=torch.float32)
    exact = a.double() @ b.double()

    def error() -> float:
        return float(((a @ b).double() - exact).abs().max() / exact.abs().max())

    before = torch.backends.cuda.matmul.fp32_precision
    with xt.kernel_policy(strict(LT)):
        errors = []
        try:
            for precision in ("ieee", "tf32", "ieee"):
                torch.backends.cuda.matmul.fp32_precision = precision
                errors.append(error())
        finally:
            torch.backends.cuda.matmul.fp32_precision = before
    assert served() == {LT}
    assert errors[0] == errors[2] < 1e-6 < 1e-5 < errors[1] < 5e-3


def test_the_policy_sets_tf32() -> None:
    policy = {"schema": "xpuruntime.policy/1", "execution": {"tf32": True}}
    before = torch.backends.cuda.matmul.fp32_precision
    with xt.kernel_policy(policy):
        assert torch.backends.cuda.matmul.allow_tf32
        assert torch.backends.cudnn.allow_tf32
    assert torch.backends.cuda.matmul.fp32_precision == before


@pytest.mark.parametrize(("kernel", "library"), [("cublasLt", "Cublaslt"), ("cublas", "Cublas")])
def test_the_short_form_is_pytorchs_own_switch(kernel: str, library: str) -> None:
    before = torch.backends.cuda.preferred_blas_library()
    with xt.kernel_policy(matmul=kernel):
        assert torch.backends.cuda.preferred_blas_library().name == library
        assert installed() == ()
    assert torch.backends.cuda.preferred_blas_library() == before


def test_a_strict_short_form_is_our_kernel() -> None:
    with xt.kernel_policy(strict("cublasLt")):
        made(64, 64) @ made(64, 64)
    assert served() == {LT}


def test_training_by_pinned_algorithms() -> None:
    layer = torch.nn.Linear(256, 512, device="cuda", dtype=torch.bfloat16)
    x = made(128, 256).requires_grad_()

    def step() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(layer(x).float().square().sum(), (x, layer.weight, layer.bias))

    expected = step()
    with xt.kernel_policy(strict(LT)):
        first = step()
    decisions = [decision for decision in xrt.decisions() if decision.op == "matmul"]
    assert [decision.chosen for decision in decisions] == [LT] * 3
    pins = {f"{decision.chosen}@{decision.config}" for decision in decisions}
    xrt.clear_decisions()
    with xt.kernel_policy(strict([*sorted(pins)])):
        again = step()
    assert {f"{decision.chosen}@{decision.config}" for decision in xrt.decisions()} <= pins
    for native, one, two in zip(expected, first, again, strict=True):
        assert_close(one, native.double(), torch.bfloat16)
        assert_close(two, native.double(), torch.bfloat16)


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("bias", [True, False])
def test_decode_steps_by_the_skinny_kernel_and_the_rest_by_pytorchs(rows: int, bias: bool) -> None:
    layer = torch.nn.Linear(1024, 2048, bias=bias, device="cuda", dtype=torch.bfloat16)
    rules = [{"match": {"op": "matmul", "m": "<=16"}, "use": "cuda_raw.skinny"}]
    x = made(rows, 1024)
    with torch.no_grad():
        exact = x.double() @ layer.weight.double().t() + (layer.bias.double() if bias else 0)
        with xt.kernel_policy(strict(rules=rules)):
            found = layer(x)
            assert served() == {"cuda_raw.skinny"}
            xrt.clear_decisions()
            layer(made(128, 1024))
            assert served() == set()
    assert_close(found, exact, torch.bfloat16)


def test_rules_of_phase_and_module_hold_in_the_thread_of_backward() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(2))).cuda().bfloat16()
    rules = [
        {"match": {"op": "matmul", "phase": "backward", "module": "1"}, "use": LT},
        {"match": {"op": "matmul", "phase": "train"}, "use": "cublas.cublas"},
    ]
    x = made(32, 64).requires_grad_()
    with xt.kernel_policy(strict(rules=rules)):
        model(x).float().sum().backward()
    counts: dict[tuple[str, str], int] = {}
    for decision in xrt.decisions():
        counts[decision.chosen, decision.module] = counts.get((decision.chosen, decision.module), 0) + decision.count
    assert counts == {("cublas.cublas", "0"): 1, ("cublas.cublas", "1"): 1, (LT, "1"): 2}


def test_what_cannot_serve_is_refused_with_its_reason() -> None:
    with (
        xt.kernel_policy(strict("cuda_raw.skinny")),
        pytest.raises(UnsupportedOperationError, match=r"kernels\.matmul asks for cuda_raw\.skinny, which cannot"),
    ):
        made(512, 64) @ made(64, 64)


def test_work_goes_to_the_current_stream() -> None:
    a, b = made(512, 512), made(512, 512)
    exact = a.double() @ b.double()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with xt.kernel_policy(strict(LT)), torch.cuda.stream(stream):
        a @ b  # loads kernels, which waits for the device
        torch.cuda._sleep(50_000_000)
        found = a @ b
        assert not stream.query()  # the product waits behind what the stream does
    stream.synchronize()
    assert_close(found, exact, torch.bfloat16)


def test_a_graph_captured_under_a_policy_replays_its_kernels() -> None:
    layer = torch.nn.Linear(256, 256, device="cuda", dtype=torch.bfloat16)
    x = made(64, 256)
    with torch.no_grad(), xt.kernel_policy(strict(LT)):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            layer(x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = layer(x)
    assert served() == {LT}
    counted = sum(decision.count for decision in xrt.decisions())
    with torch.no_grad():
        for _ in range(3):
            x.copy_(made(64, 256))
            graph.replay()
            exact = x.double() @ layer.weight.double().t() + layer.bias.double()
            assert_close(found, exact, torch.bfloat16)
    assert sum(decision.count for decision in xrt.decisions()) == counted


def routes() -> list[Any]:
    held = active_policy()
    assert held is not None
    return list(held.routes.values())


@pytest.mark.usefixtures("nothing_is_tuned")
def test_the_fastest_is_measured_once_and_never_in_a_capture() -> None:
    weight, x = made(4096, 4096), made(4, 4096)
    exact = x.double() @ weight.double().t()
    with torch.no_grad(), xt.kernel_policy(xrt.KernelPolicy(auto_strategy="best_performance")):
        graph = torch.cuda.CUDAGraph()
        torch.mm(made(64, 64), made(64, 64))  # libraries are loaded
        known = len(CONTEXT.times)
        with torch.cuda.graph(graph):
            captured = torch.mm(x, weight.t())
        assert len(CONTEXT.times) == known  # nothing was measured
        graph.replay()
        assert_close(captured, exact, torch.bfloat16)
        with tuning.replayed():
            found = torch.mm(x, weight.t())
            (route,) = [route for route in routes() if route.tuned]
        assert_close(found, exact, torch.bfloat16)
        made_of = [found for (_, key, eager), found in CONTEXT.times.items() if "4096" in key and not eager]
    (measured,) = made_of
    times = {candidate.kernel: candidate.microseconds for candidate in measured.candidates}
    assert set(times) == {"torch.mm", "auto"}
    assert all(1 < time < 1000 for time in times.values()), times
    assert measured.chosen.kernel == route.kernel
    assert times[route.kernel] <= 1.02 * times["torch.mm"]


@pytest.mark.usefixtures("nothing_is_tuned")
def test_a_graph_that_is_captured_by_hand_gets_the_fastest_on_the_device() -> None:
    weight, x = made(4096, 4096), made(4, 4096)
    with torch.no_grad(), xt.kernel_policy(xrt.KernelPolicy(auto_strategy="best_performance")):
        for _ in range(40):  # until it is known whether they wait for the device
            torch.mm(x, weight.t())
            torch.cuda.synchronize()
            time.sleep(1e-3)
        known = {(key, eager): found for (_, key, eager), found in CONTEXT.times.items() if "4096" in key}
        assert sorted(eager for _, eager in known) == [False, True]
        (eagerly,) = [route.kernel for route in routes() if route.tuned]
        xrt.clear_decisions()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            captured = torch.mm(x, weight.t())
        ours = bool(xrt.decisions())
        assert not [route for route in routes() if route.tuned]
        torch.mm(x, weight.t())
        assert [route.kernel for route in routes() if route.tuned] == [eagerly]
    (by_device,) = [found.chosen.kernel for (_, eager), found in known.items() if not eager]
    assert ours is (by_device == "auto")
    assert captured.shape == (4, 4096)


def test_determinism_needs_the_workspace_setting_before_cuda_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    torch.cuda.init()
    policy = {"schema": "xpuruntime.policy/1", "execution": {"determinism": "run_to_run"}}
    with pytest.warns(XpuRuntimeWarning, match="CUBLAS_WORKSPACE_CONFIG=:4096:8"):
        xt.set_kernel_policy(policy)
    assert torch.are_deterministic_algorithms_enabled()
    xt.clear_kernel_policy()
    assert not torch.are_deterministic_algorithms_enabled()
