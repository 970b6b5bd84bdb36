# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Code that Inductor has compiled for CUDA, under a policy: products run by its kernels, in CUDA graphs too."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

import xpuruntime as xrt
import xpuruntime.pytorch as xt
from xpuruntime.errors import XpuRuntimeWarning

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of PyTorch's compiler, on loading
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*TensorFloat32:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*max_autotune_gemm mode:UserWarning"),
]

LT = "cublas.cublasLt"


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    torch._dynamo.reset()
    xt.clear_kernel_policy()
    xrt.clear_decisions()
    yield
    xt.clear_kernel_policy()
    torch._dynamo.reset()


def strict(kernel: str) -> dict[str, Any]:
    return {"schema": "xpuruntime.policy/1", "mode": "strict", "kernels": {"matmul": kernel}}


def served() -> dict[str, int]:
    counts: dict[str, int] = {}
    for decision in xrt.decisions():
        counts[decision.chosen] = counts.get(decision.chosen, 0) + decision.count
    xrt.clear_decisions()
    return counts


class Block(torch.nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def test_forward_and_backward_obey_and_follow_every_change() -> None:
    block = Block().cuda().bfloat16()
    step = torch.compile(block, fullgraph=True)
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    leaves = [x, *block.parameters()]
    expected = torch.autograd.grad(block(x).float().square().mean(), leaves)

    def run() -> dict[str, int]:
        grad = torch.autograd.grad(step(x).float().square().mean(), leaves)
        for one, other in zip(grad, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=5e-2, atol=5e-2 * float(other.abs().max()))
        return served()

    assert run() == {}
    xt.set_kernel_policy(strict(LT))
    assert run() == {LT: 6}
    xt.set_kernel_policy(strict("cublas.cublas"))
    assert run() == {"cublas.cublas": 6}
    xt.clear_kernel_policy()
    assert run() == {}


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # PyTorch begins with one
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_calls_know_their_module_and_their_phase(mode: str) -> None:
    model = torch.nn.Sequential(Block(), Block()).cuda().bfloat16()
    step = torch.compile(model, fullgraph=True, mode=mode)
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    leaves = [x, *model.parameters()]
    expected = torch.autograd.grad(model(x).float().square().mean(), leaves)
    rules: list[dict[str, Any]] = [
        {"match": {"op": "matmul", "module": "1.up"}, "use": LT},
        {"match": {"op": "matmul", "phase": "train"}, "use": "cublas.cublas"},
        {"match": {"op": "layer_norm", "module": "0.norm"}, "use": "cuda_raw.layer_norm"},
    ]
    policy = xrt.Policy(mode="strict", kernels=xrt.KernelPolicy(rules=rules))
    with xt.kernel_policy(policy):
        torch.compiler.cudagraph_mark_step_begin()
        grad = torch.autograd.grad(step(x).float().square().mean(), leaves)
        torch.cuda.synchronize()
    for one, other in zip(grad, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=5e-2, atol=5e-2 * float(other.abs().max()))
    # A forward and two products of the backward; the forward of the other three; a norm and its gradient.
    assert served() == {LT: 3, "cublas.cublas": 3, "cuda_raw.layer_norm": 2}


def test_dynamic_shapes() -> None:
    step = torch.compile(lambda a, b: torch.relu(a @ b), fullgraph=True, dynamic=True)
    b = torch.randn(128, 64, device="cuda", dtype=torch.bfloat16)
    with xt.kernel_policy(strict(LT)):
        for rows in (24, 40, 72):
            a = torch.randn(rows, 128, device="cuda", dtype=torch.bfloat16)
            found = step(a, b)
            torch.testing.assert_close(found, torch.relu(a.float() @ b.float()).bfloat16(), rtol=2e-2, atol=0.2)
    assert set(served()) == {LT}


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # PyTorch begins with one
def test_graphs_of_reduce_overhead_replay_the_policys_kernels() -> None:
    layer = torch.nn.Linear(256, 256, device="cuda", dtype=torch.bfloat16)
    step = torch.compile(layer, mode="reduce-overhead")
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad(), xt.kernel_policy(strict(LT)):
        expected = layer(x)
        served()
        for _ in range(3):  # warm-up, capture, replay
            torch.compiler.cudagraph_mark_step_begin()
            found = step(x).clone()
        first = served()
        torch.compiler.cudagraph_mark_step_begin()
        again = step(x).clone()
        assert served() == {}  # a replay calls nothing
    assert set(first) == {LT}
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(again, found, rtol=0, atol=0)


def test_graphs_of_reduce_overhead_are_recorded_whichever_thread_imports_them() -> None:
    program = """
import threading
import torch
import xpuruntime.pytorch as xt

thread = threading.Thread(target=__import__, args=("torch._inductor.cudagraph_trees",))
thread.start()
thread.join()
layer = torch.nn.Linear(256, 256, device="cuda", dtype=torch.bfloat16)
step = torch.compile(layer, mode="reduce-overhead")
x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
for policy in ({"matmul": "cublas.cublasLt"}, {"layer_norm": "cuda_raw"}):
    with xt.kernel_policy(**policy):
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            layer.zero_grad()  # what a replay has left there is overwritten by the next one
            step(x).float().sum().backward()
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=240)


def test_max_autotune_is_said_and_with_pytorchs_own_kernels_alone_obeys() -> None:
    a = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
    with xt.kernel_policy(matmul=LT), pytest.warns(XpuRuntimeWarning, match="matrix products under max_autotune"):
        torch.compile(lambda a: a @ a, options={"max_autotune": True})(a)
    torch._dynamo.reset()
    served()
    options = {"max_autotune": True, "max_autotune_gemm_backends": "ATEN"}
    with xt.kernel_policy(strict(LT)):
        found = torch.compile(lambda a: torch.relu(a @ a), options=options)(a)
        assert set(served()) == {LT}
    torch.testing.assert_close(found, torch.relu(a @ a), rtol=2e-2, atol=0.5)


def test_cpp_wrapper_escapes_as_is_said() -> None:
    a = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
    with xt.kernel_policy(matmul=LT):
        with pytest.warns(XpuRuntimeWarning, match="matrix products under cpp_wrapper"):
            found = torch.compile(lambda a: a @ a, options={"cpp_wrapper": True})(a)
        assert served() == {}
    torch.testing.assert_close(found, a @ a, rtol=2e-2, atol=0.5)
