# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Interruptions on a CUDA device: sessions, policy blocks and captured steps go on with the right values."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from interrupting import press

import xpuruntime as xrt
import xpuruntime.pytorch as xt
from xpuruntime import _core
from xpuruntime.inference import profiling

if TYPE_CHECKING:
    from collections.abc import Iterator

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


@pytest.mark.cuda_onnxruntime
def test_sessions(session: xrt.InferenceSession, want: Any) -> None:
    tensor = torch.from_numpy(IMAGE).to(DEVICE)
    with pytest.raises(KeyboardInterrupt), xrt.profile():  # noqa: PT012
        session.run({"image": tensor})
        session.run_async({"image": IMAGE}).result()
        press()
    _clean()
    np.testing.assert_allclose(session.run({"image": IMAGE})["logits"], want, rtol=1e-3, atol=1e-4)
    answer = session.run({"image": tensor})["logits"]
    np.testing.assert_allclose(answer.cpu().numpy(), want, rtol=1e-3, atol=1e-4)


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


@pytest.mark.parametrize("explained", [False, True], ids=["policy", "explain"])
def test_policy_blocks(explained: bool) -> None:
    net, x = _net(), torch.randn(2, 16, 64, device=DEVICE)
    native = net(x).item()
    rules = [{"match": {"module": "a", "op": "matmul"}, "use": "cublas"}]
    policy = xt.kernel_policy(xrt.KernelPolicy(matmul="auto", attention="torch.math", rules=rules))
    with pytest.raises(KeyboardInterrupt), policy, xt.explain() if explained else contextlib.nullcontext():  # noqa: PT012
        net(x).backward()
        press()
    _clean()
    assert xt.get_kernel_policy() is None
    assert "xpuruntime" not in torch._C._dispatch_dump("aten::mm")
    assert torch.backends.cuda.flash_sdp_enabled()
    assert net(x).item() == pytest.approx(native, rel=1e-5)


def test_an_interrupted_capture() -> None:
    net, batch = _net(), torch.randn(2, 16, 64, device=DEVICE)
    optimizer = torch.optim.SGD(net.parameters(), lr=torch.tensor(0.0, device=DEVICE), fused=True)
    hook = net.register_forward_hook(lambda *_: press())
    with pytest.raises(KeyboardInterrupt):
        xt.capture_graph(net, (batch,), optimizer=optimizer, warmup=1)(batch)
    hook.remove()
    _clean()
    step = xt.capture_graph(net, (batch,), optimizer=optimizer)
    assert step(batch).item() == pytest.approx(net(batch).item(), rel=1e-4)
