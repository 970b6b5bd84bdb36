# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Programs that PyTorch exports while a policy holds: they have PyTorch's own operators, as without one."""

from __future__ import annotations

import contextlib
import threading
import warnings
import zipfile

import pytest

import xpuruntime as xrt

torch = pytest.importorskip("torch")
xt = pytest.importorskip("xpuruntime.pytorch")

from torch._functorch.aot_autograd import aot_export_module, aot_module  # noqa: E402 - it needs PyTorch
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_policy_is_left")]

KERNELS = {
    "matmul": "cpu.blas",
    "attention": "cpu.reference",
    "layer_norm": "cpu.vectorised",
    "rms_norm": "cpu.vectorised",
    "conv": "cpu.gemm_conv",
}
RULE = {"match": {"op": "matmul", "module": "mix"}, "use": "cpu.reference"}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.LayerNorm(8), torch.nn.RMSNorm(8)
        self.mix, self.out = torch.nn.Linear(8, 24), torch.nn.Linear(8, 8)
        self.conv = torch.nn.Conv1d(8, 8, 3, padding=1)

    def forward(self, x):
        mixed = self.mix(self.first(x)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        attended = torch.nn.functional.scaled_dot_product_attention(mixed[0], mixed[1], mixed[2], is_causal=True)
        x = self.last(self.out(attended.transpose(1, 2).flatten(2)) + x)
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


class Pair(torch.nn.Module):
    def forward(self, x):
        return (x,)


def operators(graph):
    parts = (part.graph for part in graph.modules() if hasattr(part, "graph"))
    return sorted(str(node.target) for part in parts for node in part.nodes if node.op.startswith("call"))


def exported(strict):
    def export(net, x, _):
        program = torch.export.export(net, (x,), strict=strict)
        return operators(program.graph_module), program.module()(x)

    return export


def decomposed(net, x, path):
    program = torch.export.export(net, (x,)).run_decompositions()
    torch.export.save(program, path / "net.pt2")
    with zipfile.ZipFile(path / "net.pt2") as file:
        assert not any(b"xpuruntime" in file.read(name) for name in file.namelist())
    return operators(program.graph_module), program.module()(x)


def jit_traced(net, x, _):
    traced = torch.jit.trace(net, (x,), check_trace=False)
    return sorted(node.kind() for node in traced.inlined_graph.nodes()), traced(x)


def made(mode):
    def make(net, x, _):
        with torch.no_grad():
            graph = make_fx(net, tracing_mode=mode, _allow_non_fake_inputs=True)(x)
        return operators(graph), graph(x)

    return make


def by_aot_export(net, x, _):
    graph, _ = aot_export_module(torch.nn.Sequential(net, Pair()), (x,), trace_joint=False)
    return operators(graph), None


def by_aot_function(net, x, _):
    seen = []

    def compiler(graph, _):
        seen.extend(operators(graph))
        return graph

    out = aot_module(net, fw_compiler=compiler, bw_compiler=compiler)(x.clone().requires_grad_())
    out.sum().backward()
    return sorted(seen), out.detach()


def by_dynamo(net, x, _):
    graph, _ = torch._dynamo.export(net)(x)
    return operators(graph), graph(x)


def by_fx(net, x, _):
    graph = torch.fx.symbolic_trace(torch.nn.Sequential(net.first, net.mix, torch.nn.ReLU()))
    return operators(graph), graph(x)


def to_onnx(net, x, path):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    ort = pytest.importorskip("onnxruntime")
    file = str(path / "net.onnx")
    torch.onnx.export(net, (x,), file, dynamo=True, verbose=False)
    session = ort.InferenceSession(file, providers=["CPUExecutionProvider"])
    output = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
    return sorted(f"{node.domain}.{node.op_type}" for node in onnx.load(file).graph.node), torch.from_numpy(output)


EXPORTERS = {
    "torch.export strict": exported(True),
    "torch.export": exported(False),
    "run_decompositions": decomposed,
    "torch.jit.trace": jit_traced,
    "make_fx symbolic": made("symbolic"),
    "aot_export_module": by_aot_export,
    "aot_module": by_aot_function,
    "torch._dynamo.export": by_dynamo,
    "symbolic_trace": by_fx,
    "torch.onnx.export": to_onnx,
}


@contextlib.contextmanager
def process_wide():
    xt.set_kernel_policy(xrt.Policy(mode="strict", kernels=KERNELS))
    try:
        yield
    finally:
        xt.clear_kernel_policy()


POLICIES = {
    "a block with a rule by module": lambda: xt.kernel_policy(xrt.Policy(kernels={**KERNELS, "rules": [RULE]})),
    "a strict one of the process": process_wide,
    "explain": xt.explain,
}


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    return Net().eval()


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_a_program_is_that_of_no_policy(exporter, net, tmp_path):
    export, x = EXPORTERS[exporter], torch.randn(2, 5, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, value = export(net, x, tmp_path)
        for name, policy in POLICIES.items():
            torch._dynamo.reset()
            with policy():
                found, again = export(net, x, tmp_path)
            assert found == expected, name
            assert not any("xpuruntime" in operator for operator in found)
            if value is not None:
                torch.testing.assert_close(again, value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("exporter", ["torch.export strict", "run_decompositions"])
def test_a_program_that_was_exported_under_a_policy_obeys_it_where_it_runs(exporter, net, tmp_path):
    x = torch.randn(2, 5, 8)
    with warnings.catch_warnings(), xt.kernel_policy(xrt.Policy(kernels=KERNELS)):
        warnings.simplefilter("ignore")
        program = torch.export.export(net, (x,), strict="strict" in exporter)
        if exporter == "run_decompositions":
            program = program.run_decompositions()
        xrt.clear_decisions()
        torch.testing.assert_close(program.module()(x), net(x), rtol=1e-4, atol=1e-5)
        assert {decision.chosen for decision in xrt.decisions()} >= {"cpu.blas"}


def test_what_strict_exports_need_is_given_back():
    from torch._dynamo import convert_frame, functional_export

    before = convert_frame.get_traced_fn, functional_export.get_traced_fn
    with xt.kernel_policy(xrt.Policy(kernels={"rules": [RULE]})):
        assert convert_frame.get_traced_fn is not before[0]
    assert (convert_frame.get_traced_fn, functional_export.get_traced_fn) == before


def test_another_thread_computes_under_the_policy_while_one_exports(net):
    x = torch.randn(2, 5, 8)
    with xt.kernel_policy(xrt.Policy(kernels=KERNELS)):
        thread = threading.Thread(target=lambda: torch.export.export(net, (x,)))
        thread.start()
        xrt.clear_decisions()
        torch.mm(x[0], x[0].T)
        assert [decision.chosen for decision in xrt.decisions()][:1] == ["cpu.blas"]
        thread.join()
