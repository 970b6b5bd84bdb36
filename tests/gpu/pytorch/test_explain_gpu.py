# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`explain` and `profile` on a CUDA device: kernels by name, times of the device, replays, what escapes."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.autograd import DeviceType  # noqa: E402

import xpuruntime as xrt  # noqa: E402
import xpuruntime.pytorch as xt  # noqa: E402
from xpuruntime.errors import UnsupportedOperationError, XpuRuntimeWarning  # noqa: E402

pytestmark = pytest.mark.gpu

#: What a product of PyTorch's own runs by, of whichever library.
PRODUCT = re.compile(r"nvjet|gemm|gemv|cutlass|xmma|splitk", re.IGNORECASE)


@pytest.fixture(autouse=True)
def _no_policy_is_left():
    xt.clear_kernel_policy()
    yield
    xt.clear_kernel_policy()


class Block(torch.nn.Module):
    """A transformer block."""

    def __init__(self, width: int = 512, heads: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.norm = torch.nn.LayerNorm(width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        b, s, w = x.shape
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, s, w))
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


@pytest.fixture
def block() -> Any:
    torch.manual_seed(0)
    return Block().to("cuda", torch.bfloat16)


@pytest.fixture
def x() -> Any:
    torch.manual_seed(1)
    return torch.randn(2, 256, 512, device="cuda", dtype=torch.bfloat16)


def step(model: Any, x: Any) -> None:
    model(x).square().mean().backward()


def of(found: Any, op: str, **values: Any) -> list[Any]:
    return [row for row in found.rows if row.op == op and all(getattr(row, k) == v for k, v in values.items())]


def device_ns(profiler: Any) -> int:
    """Return the time of all work of the device that the profiler of an explain block saw."""
    events = profiler.events()
    return sum(e.duration_ns() for e in events if e.device_type() == DeviceType.CUDA and not e.is_user_annotation())


def test_a_step_without_a_policy(block, x):
    step(block, x)
    with xt.explain() as report:
        step(block, x)
    assert report.time_kind == "device"
    products = of(report, "matmul")
    assert sum(row.count for row in products) == 4 + 8
    assert {row.module for row in products} == {"qkv", "out", "up", "down"}
    assert {row.phase for row in products} == {"train", "backward"}
    for row in products:
        assert row.time_us > 0, row
        assert any(PRODUCT.search(name) for name in row.observed), row
        assert row.status == "default"
    attention = of(report, "attention")
    assert {row.phase for row in attention} == {"train", "backward"}
    assert any(re.search("flash|cudnn|fmha|sdpa", name) for row in attention for name in row.observed)
    norms = of(report, "layer_norm")
    assert {(row.module, row.phase) for row in norms} == {("norm", "train"), ("norm", "backward")}
    assert all(row.time_us > 0 for row in norms)


def test_times_are_all_of_the_device_and_shares_sum_to_one(block, x):
    step(block, x)
    watching = xt.explain()
    with xt.kernel_policy(layer_norm="cuda_raw.layer_norm"), watching as found:
        step(block, x)
        profiler = watching._watch.profiler
    assert found.total_us == pytest.approx(device_ns(profiler) / 1000, rel=1e-6)
    averages = profiler.torch.key_averages()
    # An operator repeats there the time of its kernels, which stand there, too.
    told = sum(
        event.self_device_time_total
        for event in averages
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    )
    assert found.total_us == pytest.approx(told, rel=0.01)
    shares = found.coverage
    parts = (shares.honoured, shares.substituted, shares.default, shares.bypassed, shares.opaque, shares.other)
    assert sum(parts) == pytest.approx(1)
    assert shares.rule > 0
    assert shares.default > 0


def test_our_norm_forward_and_backward(block, x):
    with xt.kernel_policy(layer_norm="cuda_raw.layer_norm"):
        step(block, x)
        with xt.explain() as report:
            step(block, x)
    rows = {row.phase: row for row in of(report, "layer_norm")}
    assert {row.status for row in rows.values()} == {"honoured"}
    assert any(re.search("forward_(long_)?rows", name) for name in rows["train"].observed), rows["train"]
    assert any(re.search("backward_", name) for name in rows["backward"].observed), rows["backward"]
    for row in rows.values():
        assert row.resolved.startswith("cuda_raw.layer_norm")
        assert (row.source, row.module) == ("kernels.layer_norm", "norm")
        assert row.time_us > 0


def test_our_product_of_few_rows():
    a = torch.randn(4, 4096, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad(), xt.kernel_policy(matmul=["cuda_raw.skinny", "auto"]):
        torch.mm(a, w.t())
        with xt.explain() as report:
            for _ in range(5):
                torch.mm(a, w.t())
    (row,) = of(report, "matmul")
    assert (row.status, row.count, row.phase) == ("honoured", 5, "infer")
    assert row.resolved.startswith("cuda_raw.skinny")
    assert any("multiply_" in name for name in row.observed), row.observed
    assert report.require(coverage=0.99) is report


def test_cublaslt_by_our_call(block, x):
    with xt.kernel_policy(matmul="cublas.cublasLt"):
        step(block, x)
        with xt.explain() as report:
            step(block, x)
    rows = of(report, "matmul")
    assert {row.status for row in rows} == {"honoured"}
    # Which algorithm it was is in the name: what a policy needs to replay it.
    assert all(row.resolved.startswith("cublas.cublasLt") for row in rows)
    assert all(any(PRODUCT.search(name) for name in row.observed) for row in rows), rows
    assert report.coverage.bypassed == 0


@pytest.mark.parametrize(
    ("kernel", "name"), [("torch.flash", "flash"), ("torch.efficient", "fmha|cutlass"), ("torch.cudnn", "cudnn|sdpa")]
)
def test_attention_of_pytorchs_own_choice(kernel, name):
    q, k, v = (torch.randn(2, 8, 256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    def work() -> None:
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).square().mean().backward()

    with xt.kernel_policy(attention=kernel):
        work()
        with xt.explain() as report:
            work()
    rows = of(report, "attention")
    assert {row.phase for row in rows} == {"train", "backward"}
    assert {row.status for row in rows} == {"honoured"}, rows
    assert {row.resolved for row in rows} == {kernel}
    for row in rows:
        assert any(re.search(name, one, re.IGNORECASE) for one in row.observed), row


def test_our_attention_forward_and_backward():
    q, k, v = (torch.randn(2, 8, 256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    def work() -> None:
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).square().mean().backward()

    with xt.kernel_policy(attention="cuda_raw.flash_attention_v2"):
        work()
        with xt.explain() as report:
            work()
    rows = {row.phase: row for row in of(report, "attention")}
    assert set(rows) == {"train", "backward"}
    assert {row.status for row in rows.values()} == {"honoured"}
    assert any("forward" in name for name in rows["train"].observed), rows["train"]
    assert any("flash_backward" in name for name in rows["backward"].observed), rows["backward"]


def test_a_convolution():
    conv = torch.nn.Conv2d(16, 32, 3, padding=1).to("cuda", torch.float16)
    x = torch.randn(4, 16, 32, 32, device="cuda", dtype=torch.float16)
    step(conv, x)
    with xt.explain() as report:
        step(conv, x)
    rows = of(report, "conv")
    assert {row.phase for row in rows} == {"train", "backward"}
    assert all(row.observed and row.time_us > 0 for row in rows), rows


def test_cudnns_recurrent_layer_bypasses_a_policy():
    model = torch.nn.Sequential(torch.nn.LSTM(64, 64).cuda())
    x = torch.randn(16, 8, 64, device="cuda")

    def work() -> None:
        model(x)[0].square().mean().backward()

    with xt.kernel_policy(matmul="cublas.cublasLt"):
        with pytest.warns(XpuRuntimeWarning, match="_cudnn_rnn of .* recurrent layer"):
            work()
        with xt.explain() as report:
            work()
    rows = [row for row in report.rows if row.status == "bypassed"]
    assert {"aten::_cudnn_rnn", "aten::_cudnn_rnn_backward"} <= {row.operator for row in rows}, rows
    assert {row.module for row in rows} == {"0"}
    assert all(row.time_us > 0 for row in rows)
    with pytest.raises(UnsupportedOperationError, match="recurrent"):
        report.require()
    strict = xrt.Policy(mode="strict", kernels={"matmul": "cublas.cublasLt"})
    with xt.kernel_policy(strict), pytest.raises(UnsupportedOperationError, match="use: torch"):
        model(x)


def test_a_replay_is_opaque():
    a = torch.randn(512, 512, device="cuda", dtype=torch.bfloat16)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.mm(a, a)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.softmax(torch.mm(a, a), -1)
    with xt.explain() as report:
        for _ in range(3):
            graph.replay()
    (row,) = (row for row in report.rows if row.status == "opaque")
    assert (row.operator, row.count) == ("CUDA graph", 3)
    assert any(PRODUCT.search(name) for name in row.observed), row.observed
    assert any("softmax" in name.lower() for name in row.observed), row.observed
    assert report.coverage.opaque > 0.9
    assert of(report, "matmul") == []


def test_calls_while_a_graph_is_captured_are_counted():
    a = torch.randn(512, 512, device="cuda", dtype=torch.bfloat16)
    with xt.kernel_policy(matmul="cublas.cublasLt"):
        torch.mm(a, a)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with xt.explain() as report:
            with torch.cuda.graph(graph):
                b = torch.mm(a, a)
            graph.replay()
    torch.testing.assert_close(b, torch.mm(a, a))
    (row,) = of(report, "matmul")
    assert (row.status, row.count) == ("honoured", 1)
    assert [row.count for row in report.rows if row.status == "opaque"] == [1]


def test_compiled_code(block, x):
    compiled = torch.compile(block)
    with xt.kernel_policy(matmul="cublas.cublasLt"):
        step(compiled, x)
        with xt.explain() as report:
            step(compiled, x)
    rows = of(report, "matmul")
    assert sum(row.count for row in rows if row.status == "honoured") == 4 + 8, rows
    assert report.coverage.bypassed == 0
    # No policy speaks of norms, so that torch.compile fuses this one into a kernel of its own.
    norms = of(report, "layer_norm")
    assert norms
    assert {row.status for row in norms} == {"default"}
    assert any(name.startswith("triton_") for row in norms for name in row.observed), norms


def test_threads_of_backward_and_of_the_program(block, x):
    with xt.kernel_policy(matmul="cublas.cublasLt"):
        step(block, x)
        with xt.explain() as report:
            thread = threading.Thread(target=step, args=(block, x))
            thread.start()
            thread.join()
    rows = of(report, "matmul")
    assert sum(row.count for row in rows) == 4 + 8
    assert {row.status for row in rows} == {"honoured"}


def test_one_trace_has_kernels_ranges_decisions_and_captures(tmp_path, block, x):
    path = tmp_path / "trace.json.gz"
    import gzip

    a = torch.randn(512, 512, device="cuda", dtype=torch.bfloat16)
    with xt.kernel_policy(matmul="cublas.cublasLt", layer_norm="cuda_raw.layer_norm"):
        step(block, x)
        torch.mm(a, a)
        torch.cuda.synchronize()
        with xt.profile(path) as prof:
            step(block, x)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                torch.mm(a, a)
            graph.replay()
    assert sum(event.self_device_time_total for event in prof.key_averages()) > 0
    document = json.loads(gzip.decompress(path.read_bytes()))
    events = document["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    assert kernels
    ours = [event for event in events if event.get("cat") == "xpuruntime" and event["ph"] == "X"]
    resolved = {event["args"].get("resolved", "").partition("@")[0] for event in ours}
    assert {"cublas.cublasLt", "cuda_raw.layer_norm"} <= resolved
    ranges = {event["name"] for event in events if event.get("cat") == "user_annotation"}
    assert "xpuruntime layer_norm cuda_raw.layer_norm norm" in ranges
    assert "xpuruntime matmul cublas.cublasLt qkv" in ranges
    assert any(event["name"] == "capture of a CUDA graph" for event in ours)
    # One clock: decisions fall into the time of what PyTorch recorded.
    recorded = [event for event in events if event.get("cat") == "cpu_op"]
    first = min(event["ts"] for event in recorded)
    last = max(event["ts"] + event["dur"] for event in recorded)
    assert all(first - 1e4 <= event["ts"] <= last + 1e4 for event in ours)
    flows = [event for event in events if event.get("cat") == "xpuruntime" and event["ph"] in "sf"]
    assert len(flows) == 2 * len([event for event in ours if "resolved" in event["args"]])
