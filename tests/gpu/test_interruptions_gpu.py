# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Interruptions on a CUDA device: sessions, policy blocks and captured steps go on with the right values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from interrupting import WAYS, sweep

import xpuruntime as xrt
import xpuruntime.pytorch as xt
from xpuruntime import _core
from xpuruntime.inference import profiling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# An interruption inside of a destructor is lost: Python writes it to stderr, and pytest warns of it.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
DEVICE = "cuda:0"
IMAGE = np.random.default_rng(7).random((8, 1, 8, 8), np.float32)


@pytest.fixture(scope="module")
def want() -> Any:
    with xrt.InferenceSession(xrt.demo_model_path(), device="cpu", engine="onnxruntime") as session:
        return session.run({"image": IMAGE})["logits"]


@pytest.fixture
def session() -> Iterator[xrt.InferenceSession]:
    policy = {"execution": {"precision": "fp32"}}
    with xrt.InferenceSession(xrt.demo_model_path(), device=DEVICE, engine="onnxruntime", policy=policy) as opened:
        yield opened


def _clean() -> None:
    assert profiling._going_on is None
    assert not _core.profiler_active()
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


def _sweep(way: str, call: Callable[[], Any], check: Callable[[], Any], times: int) -> None:
    """Interrupt a call at random points. A bytecode is met always; a short call may be over before a signal comes."""
    hits = sweep(way, call, check, times)
    assert hits > 0 or way != "bytecode", f"none of {times} calls was interrupted"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["host", "device", "async", "bound", "explain"])
def test_sessions(session: xrt.InferenceSession, want: Any, way: str, kind: str) -> None:
    tensor = torch.from_numpy(IMAGE).to(DEVICE)

    def work() -> None:
        if kind == "host":
            session.run({"image": IMAGE})
        elif kind == "device":
            session.run({"image": tensor})
        elif kind == "async":
            for future in [session.run_async({"image": IMAGE}) for _ in range(4)]:
                future.result()
        elif kind == "bound":
            session.bind({"image": tensor}).run()
        else:
            session.explain({"image": IMAGE}, runs=1)

    def check() -> None:
        _clean()
        np.testing.assert_allclose(session.run({"image": IMAGE})["logits"], want, rtol=1e-3, atol=1e-4)
        answer = session.run({"image": tensor})["logits"]
        np.testing.assert_allclose(answer.cpu().numpy(), want, rtol=1e-3, atol=1e-4)

    _sweep(way, work, check, {"explain": 5, "bound": 100}.get(kind, 170))


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.a(x).view(2, 4, 16, 16)
        return self.b(torch.nn.functional.scaled_dot_product_attention(q, q, q).reshape(2, 16, 64)).square().mean()


def _net() -> Net:
    torch.manual_seed(0)
    return Net().to(DEVICE)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("explained", [False, True], ids=["policy", "explain"])
def test_policy_blocks(way: str, explained: bool) -> None:
    net, x = _net(), torch.randn(2, 16, 64, device=DEVICE)
    native = net(x).item()
    rules = [{"match": {"module": "a", "op": "matmul"}, "use": "cublas"}]

    def work() -> None:
        with xt.kernel_policy(xrt.KernelPolicy(matmul="auto", attention="torch.math", rules=rules)):
            if explained:
                with xt.explain():
                    net(x).backward()
            else:
                net(x).backward()

    def check() -> None:
        _clean()
        assert xt.get_kernel_policy() is None
        assert "xpuruntime" not in torch._C._dispatch_dump("aten::mm")
        assert torch.backends.cuda.flash_sdp_enabled()
        assert net(x).item() == pytest.approx(native, rel=1e-5)

    _sweep(way, work, check, 20 if explained else 170)


@pytest.mark.parametrize("way", WAYS)
def test_a_captured_step(way: str) -> None:
    """An interrupted call of a captured step has been done or not; the next ones train as steps without a graph do."""
    net, batch = _net(), torch.randn(2, 16, 64, device=DEVICE)
    optimizer = torch.optim.SGD(net.parameters(), lr=torch.tensor(0.0, device=DEVICE), fused=True)
    with xt.kernel_policy(matmul="auto"):
        step = xt.capture_graph(net, (batch,), optimizer=optimizer)

        def check() -> None:
            _clean()
            x = torch.randn(2, 16, 64, device=DEVICE)
            assert step(x).item() == pytest.approx(net(x).item(), rel=1e-4)

        _sweep(way, lambda: step(batch), check, 170)


@pytest.mark.parametrize("way", WAYS)
def test_an_interrupted_capture(way: str) -> None:
    net, batch = _net(), torch.randn(2, 16, 64, device=DEVICE)
    optimizer = torch.optim.SGD(net.parameters(), lr=torch.tensor(0.0, device=DEVICE), fused=True)

    def work() -> None:
        step = xt.capture_graph(net, (batch,), optimizer=optimizer, warmup=1)
        step(batch)

    def check() -> None:
        _clean()
        assert torch.isfinite(net(batch)).item()

    _sweep(way, work, check, 12)
    step = xt.capture_graph(net, (batch,), optimizer=optimizer)
    assert step(batch).item() == pytest.approx(net(batch).item(), rel=1e-4)
