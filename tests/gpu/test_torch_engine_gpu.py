# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The torch engine on a CUDA device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xpuruntime as xrt

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu


class Block(torch.nn.Module):
    """A transformer block."""

    def __init__(self, width: int = 256, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = torch.nn.LayerNorm(width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.norm2 = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        b, s, w = x.shape
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, s, w))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm2(x))))


@pytest.fixture
def block() -> Any:
    torch.manual_seed(0)
    return Block().eval()


@pytest.fixture
def x() -> Any:
    return torch.randn(2, 64, 256, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def program(block: Any, tmp_path: Path) -> Path:
    size = torch.export.Dim("batch", min=1, max=16)
    torch.export.save(
        torch.export.export(block, (torch.zeros(2, 64, 256),), dynamic_shapes={"x": {0: size}}), tmp_path / "block.pt2"
    )
    return tmp_path / "block.pt2"


def wanted(block: Any, x: Any) -> np.ndarray[Any, Any]:
    import copy

    with torch.no_grad():
        return copy.deepcopy(block).double()(x.double()).numpy()


def test_a_program_exported_on_the_cpu_runs_there(program: Path, block: Any, x: Any) -> None:
    with xrt.InferenceSession(program, device="cuda:0", precision="fp32") as session:
        on_device = session.run({"x": x.cuda()})["output"]
        assert on_device.device == torch.device("cuda:0")
        on_host = session.run({"x": x.numpy()})["output"]
        assert isinstance(on_host, np.ndarray)
    np.testing.assert_allclose(on_device.cpu().numpy(), wanted(block, x), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(on_host, on_device.cpu().numpy(), rtol=1e-5, atol=1e-5)


def test_a_module_stays_where_it_is(block: Any, x: Any) -> None:
    with pytest.raises(xrt.XpuRuntimeError, match=r"the module is on cpu.*module\.to\('cuda:0'\)"):
        xrt.InferenceSession(block, example_inputs=(x,), device="cuda:0")
    moved = block.cuda()
    with xrt.InferenceSession(moved, example_inputs=(x.cuda(),)) as session:
        assert session.plan.device == "cuda:0"
        got = session.run({"x": x.cuda()})["output"]
        with pytest.raises(xrt.InputError, match="is on cpu"):
            session.run({"x": x})
    with torch.no_grad():
        assert torch.equal(got, moved(x.cuda()))


def test_evidence_names_device_kernels(program: Path) -> None:
    with xrt.InferenceSession(program, device="cuda:0", precision="fp16") as session:
        report = session.explain({"x": torch.randn(2, 64, 256, device="cuda")}, runs=3)
    assert report.honoured, report.headline
    kernels = {unit.op: unit for unit in report.units}
    linear = kernels["aten.linear"]
    assert linear.kernel
    assert linear.precision_run == "fp16"
    assert linear.time is not None
    assert linear.time.kind == "device"
    assert linear.time.value > 0
    assert kernels["aten.layer_norm"].kernel


def test_tf32_is_switched_and_given_back(program: Path, x: Any) -> None:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    with xrt.InferenceSession(program, device="cuda:0", precision="tf32") as session:
        assert torch.backends.cuda.matmul.allow_tf32
        loose = session.run({"x": x.cuda()})["output"]
        with pytest.raises(xrt.EngineError, match=r"allow_tf32 is one for the whole process"):
            xrt.InferenceSession(program, device="cuda:0", precision="fp32")
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == before
    with xrt.InferenceSession(program, device="cuda:0", precision="fp32") as session:
        exact = session.run({"x": x.cuda()})["output"]
    assert not torch.equal(loose, exact)


@pytest.mark.parametrize("own", [False, True])
def test_bound_and_captured(own: bool, program: Path, x: Any) -> None:
    policy = {"execution": {"cuda_graph": "require", "device": "cuda:0"}}
    stream = torch.cuda.Stream() if own else torch.cuda.current_stream()
    with xrt.InferenceSession(program, policy=policy) as session, torch.cuda.stream(stream):
        binding = session.bind({"x": (2, 64, 256)}, stream=stream if own else None)
        assert binding.graph == "captured"
        for scale in (1.0, 2.0):
            binding.inputs["x"].copy_(scale * x.cuda())
            binding.run()
            want = session.run({"x": scale * x.cuda()})["output"]
            torch.testing.assert_close(binding.outputs["output"], want, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.*cuda_graph:xpuruntime.XpuRuntimeWarning")
def test_what_cannot_be_captured_says_why(x: Any) -> None:
    class Waits(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x * float(x.sum())

    module = Waits().eval()
    with xrt.InferenceSession(
        module, example_inputs=(x.cuda(),), policy={"execution": {"cuda_graph": "prefer"}}, device="cuda:0"
    ) as session:
        binding = session.bind({"x": x.cuda()})
        assert binding.graph not in ("off", "captured")
        binding.run()
    torch.randn(4, device="cuda")  # what failed has not spoiled the generator
    with (
        xrt.InferenceSession(
            module, example_inputs=(x.cuda(),), policy={"execution": {"cuda_graph": "require"}}, device="cuda:0"
        ) as session,
        pytest.raises(xrt.EngineError, match="cannot be captured"),
    ):
        session.bind({"x": x.cuda()})


def test_runs_on_the_callers_stream(program: Path, x: Any) -> None:
    stream = torch.cuda.Stream()
    with xrt.InferenceSession(program, device="cuda:0") as session:
        want = session.run({"x": x.cuda()})["output"]
        with torch.cuda.stream(stream):
            given = x.cuda(non_blocking=True)
        got = session.run({"x": given}, stream=stream)["output"]
        stream.synchronize()
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
