# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`torch.compile` under a policy: compiled code obeys it, also after it changes, and what escapes is said."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import warnings

import pytest

import xpuruntime as xrt
from xpuruntime.errors import InputError, PolicyError, XpuRuntimeWarning

torch = pytest.importorskip("torch")
xt = pytest.importorskip("xpuruntime.pytorch")

from xpuruntime.pytorch.dispatch.context import CONTEXT  # noqa: E402

pytestmark = pytest.mark.torch

REFERENCE = {"schema": "xpuruntime.policy/1", "mode": "strict", "kernels": {"matmul": "cpu.reference"}}


@pytest.fixture(autouse=True)
def _no_policy_is_left(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    xt.clear_kernel_policy()
    torch._dynamo.reset()
    xrt.clear_decisions()
    yield
    xt.clear_kernel_policy()
    torch._dynamo.reset()
    assert torch.compiler.config.cache_key_tag == ""


def served() -> dict[str, int]:
    counts: dict[str, int] = {}
    for decision in xrt.decisions():
        counts[decision.chosen] = counts.get(decision.chosen, 0) + decision.count
    xrt.clear_decisions()
    return counts


def test_compiled_code_obeys_forward_and_backward_and_after_every_change():
    layer = torch.nn.Linear(8, 4)
    step = torch.compile(layer, fullgraph=True)
    x = torch.randn(3, 8, requires_grad=True)
    expected = torch.autograd.grad(layer(x).sum(), (x, layer.weight, layer.bias))

    def run():
        grad = torch.autograd.grad(step(x).sum(), (x, layer.weight, layer.bias))
        torch.testing.assert_close(grad, expected)
        return served()

    assert run() == {}
    xt.set_kernel_policy(REFERENCE)
    assert run() == {"cpu.reference": 3}
    xt.set_kernel_policy({**REFERENCE, "kernels": {"matmul": "cpu.blas"}})
    assert run() == {"cpu.blas": 3}
    xt.clear_kernel_policy()
    assert run() == {}


def test_another_kernel_for_products_compiles_nothing_again():
    compiles = []

    def backend(graph, inputs):
        compiles.append(graph)
        return graph.forward

    step = torch.compile(lambda a: a @ a, backend=backend)
    a = torch.randn(4, 4)
    xt.set_kernel_policy(REFERENCE)
    step(a)
    xt.set_kernel_policy({**REFERENCE, "kernels": {"matmul": "cpu.blas"}})
    step(a)
    assert len(compiles) == 1
    assert served() == {"cpu.reference": 1, "cpu.blas": 1}
    xt.set_kernel_policy(matmul="cpu.blas", layer_norm="cpu.reference")
    step(a)
    assert len(compiles) == 2


def test_the_key_of_the_cache_is_the_policys_and_keeps_what_was_there():
    config = torch.compiler.config
    config.cache_key_tag = "mine"
    try:
        tags = []
        for kernels in ({"matmul": "cpu.blas"}, {"layer_norm": "cpu.reference"}, {"layer_norm": "torch"}):
            with xt.kernel_policy(**kernels):
                tags.append(config.cache_key_tag)
        assert tags[0] == "mine"  # nothing of it is built into code
        assert tags[1].startswith("minexpuruntime-")
        assert len(set(tags)) == 3
        assert config.cache_key_tag == "mine"
    finally:
        config.cache_key_tag = ""


CHILD = """
import sys, torch, xpuruntime.pytorch as xt
from torch.profiler import profile, ProfilerActivity
q = torch.ones(1, 2, 8, 16)
xt.set_kernel_policy(attention=sys.argv[1])
step = torch.compile(lambda q: torch.nn.functional.scaled_dot_product_attention(q, q, q))
step(q)
with profile(activities=[ProfilerActivity.CPU]) as profiled:
    step(q)
print(any("flash_attention" in one.key for one in profiled.key_averages()))
"""


@pytest.mark.slow
def test_processes_that_share_a_cache_on_disk_do_not_share_code(tmp_path):
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    flash = {}
    for kernel in ("torch.math", "torch.flash"):
        done = subprocess.run(
            [sys.executable, "-c", CHILD, kernel],
            capture_output=True, text=True, timeout=300, check=False, env=environment,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        flash[kernel] = done.stdout.strip()
    assert flash == {"torch.math": "False", "torch.flash": "True"}


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"cpp_wrapper": True}, "matrix products under cpp_wrapper"),
        ({"max_autotune": True}, "matrix products under max_autotune: Inductor may take a kernel of TRITON, CPP"),
        ({"freezing": True}, "matrix products under freezing"),
    ],
)
def test_settings_that_escape_are_said_once_and_refused_under_strict(options, what, monkeypatch):
    from torch._inductor import compile_fx

    monkeypatch.setattr(compile_fx, "compile_fx", lambda graph, inputs, **more: graph.forward)  # saves the compiler
    a = torch.randn(4, 4)

    def compile_twice():
        for more in (0, 1):
            torch.compile(lambda a, more=more: a @ a + more, options=options)(a)

    with xt.kernel_policy(matmul="cpu.blas"):
        with pytest.warns(XpuRuntimeWarning, match=what) as said:
            compile_twice()
        assert len(said) == 1
    torch._dynamo.reset()
    with xt.kernel_policy(REFERENCE), pytest.raises(Exception, match=f"would bypass it.*{what}.*Fix: set"):
        torch.compile(lambda a: a @ a, options=options)(a)


def test_max_autotune_of_pytorchs_own_kernels_is_fine(monkeypatch):
    from torch._inductor import compile_fx

    monkeypatch.setattr(compile_fx, "compile_fx", lambda graph, inputs, **more: graph.forward)
    options = {"max_autotune": True, "max_autotune_gemm_backends": "ATEN"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with xt.kernel_policy(REFERENCE):
            torch.compile(lambda a: a @ a, options=options)(torch.randn(4, 4))
    assert served() == {"cpu.reference": 1}


def test_packages_of_aot_inductor_are_said(monkeypatch):
    import torch._inductor

    exported = torch.export.export(torch.nn.Linear(4, 4), (torch.randn(2, 4),))
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_aot", lambda *args, **more: "package")
    with (
        xt.kernel_policy(matmul="cpu.blas"),
        pytest.warns(XpuRuntimeWarning, match="matrix products in a package of AOTInductor"),
    ):
        torch._inductor.aot_compile(exported.module(), (torch.randn(2, 4),))


@pytest.mark.filterwarnings("ignore:.*isinstance.treespec:FutureWarning")  # PyTorch's own, on loading a package
def test_a_package_of_aot_inductor_that_runs_under_a_policy_is_said_or_refused(tmp_path):
    layer, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    path = torch._inductor.aoti_compile_and_package(
        torch.export.export(layer, (x,)), package_path=str(tmp_path / "layer.pt2")
    )
    package = torch._inductor.aoti_load_package(path)
    with xt.kernel_policy(matmul="cpu.blas"):
        with pytest.warns(XpuRuntimeWarning, match="matrix products in a package of AOTInductor"):
            found = package(x)
        torch.testing.assert_close(found, layer(x))
        with warnings.catch_warnings():
            warnings.simplefilter("error", XpuRuntimeWarning)
            package(x)  # said once
    with xt.kernel_policy(REFERENCE), pytest.raises(PolicyError, match="run the exported program itself"):
        package(x)
    with xt.kernel_policy(layer_norm="cpu.vectorised"), warnings.catch_warnings():
        warnings.simplefilter("error", XpuRuntimeWarning)
        package(x)  # a policy that does not speak of products
    package(x)
    assert not hasattr(type(package).__call__, "__wrapped__")


def test_the_package_is_watched_though_it_is_imported_later():
    code = (
        "import sys, torch, xpuruntime.pytorch as xt\n"
        "xt.set_kernel_policy(matmul='cpu.blas'), xt.export\n"
        "assert not {'torch._inductor', 'onnxscript'} & sys.modules.keys()\n"
        "import torch._inductor\n"
        "assert hasattr(torch._inductor.aot_compile, '__wrapped__')\n"
        "xt.clear_kernel_policy()\n"
        "assert not hasattr(torch._inductor.aot_compile, '__wrapped__')\n"
        "assert not hasattr(torch._TorchCompileInductorWrapper.__call__, '__wrapped__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_escapes_of_modules():
    model = torch.nn.ModuleDict(
        {"memory": torch.nn.LSTM(4, 4), "block": torch.nn.TransformerEncoderLayer(4, 2), "last": torch.nn.Linear(4, 4)}
    )
    found = {(gap.op, gap.what) for gap in xt.coverage_gaps(xrt.KernelPolicy(matmul="cpu.blas"), module=model)}
    assert found == {("matmul", "memory")}
    assert xt.coverage_gaps(module=model) == ()
    with pytest.raises(InputError, match="module is a str"):
        xt.coverage_gaps(module="model")
    with pytest.raises(InputError, match="options is a list"):
        xt.coverage_gaps(options=["cpp_wrapper"])
    with xt.kernel_policy(rules=[{"match": {"op": "attention"}, "use": "cpu.reference"}]):
        assert xt.coverage_gaps(module=model) == ()  # the fast path is off while such a policy holds
        torch.backends.mha.set_fastpath_enabled(True)
        found = {(gap.op, gap.what) for gap in xt.coverage_gaps(module=model)}
        assert found == {("attention", "block"), ("attention", "block.self_attn")}
    # A rule that leaves a layer to PyTorch settles it, as the fix says; so do types that the layer has not.
    rules = [{"match": {"module": "memory"}, "use": "torch"}]
    assert xt.coverage_gaps(xrt.KernelPolicy(matmul="cpu.blas", rules=rules), module=model) == ()
    halves = [{"match": {"op": "matmul", "dtype": "fp16"}, "use": "cpu.blas"}]
    assert xt.coverage_gaps(xrt.KernelPolicy(rules=halves), module=model) == ()
    found = xt.coverage_gaps(xrt.KernelPolicy(matmul="cpu.blas"), options={"cpp_wrapper": True})
    assert [one.what for one in found] == ["matrix products under cpp_wrapper"]


@pytest.mark.filterwarnings("ignore:The tensor attributes self.memory:UserWarning")  # of a layer of PyTorch's own
def test_gaps_are_found_in_a_program_before_it_runs():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.memory, self.mixer = torch.nn.LSTM(4, 4), torch.nn.MultiheadAttention(4, 2)

        def forward(self, x):
            y = self.memory(x)[0]
            y = self.mixer(y, y, y)[0]
            return self.mixer(y, y, y, need_weights=False)[0]

    program = torch.export.export(Net(), (torch.randn(3, 2, 4),)).module()
    policy = xrt.KernelPolicy(matmul="cpu.blas", attention="cpu.reference")
    found = [(gap.op, gap.what) for gap in xt.coverage_gaps(policy, module=program)]
    assert found == [("matmul", "memory"), ("attention", "mixer")]
    assert xt.coverage_gaps(xrt.KernelPolicy(attention="torch.math"), module=program) == ()


@pytest.mark.parametrize("name", ["flex_attention", "varlen_attn", "_native_multi_head_attention", "mkldnn_rnn_layer"])
def test_gaps_are_found_in_a_graph_by_the_operator(name):
    import torch.nn.attention.varlen

    op = {
        "flex_attention": torch.ops.higher_order.flex_attention,
        "varlen_attn": torch.ops.torch_attn._varlen_attn.default,
    }.get(name) or getattr(torch.ops.aten, name).default
    graph = torch.fx.Graph()
    graph.output(graph.call_function(op, (graph.placeholder("x"),)))
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    (gap,) = xt.coverage_gaps(xrt.KernelPolicy(matmul="cpu.blas", attention="cpu.reference"), module=module)
    assert gap.op == ("matmul" if name == "mkldnn_rnn_layer" else "attention")
    assert name.strip("_") in gap.what
    rules = [{"match": {"op": gap.op}, "use": "torch"}]
    assert xt.coverage_gaps(xrt.KernelPolicy(rules=rules), module=module) == ()


def test_convolutions_without_a_kernel_escape():
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 1, 2), torch.nn.Conv3d(1, 1, 2), torch.nn.ConvTranspose2d(1, 1, 2))
    policy = xrt.KernelPolicy(conv="cpu.gemm_conv")
    assert [(gap.op, gap.what) for gap in xt.coverage_gaps(policy, module=model)] == [("conv", "1"), ("conv", "2")]
    rules = [{"match": {"module": "[12]"}, "use": "torch"}]
    assert xt.coverage_gaps(policy.replace(rules=rules), module=model) == ()
    assert xt.coverage_gaps(xrt.KernelPolicy(matmul="cpu.blas"), module=model) == ()


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported:UserWarning")  # by oneDNN, says PyTorch
def test_recurrent_layers_in_a_graph_are_refused_where_they_are_one_kernel():
    x, strict = torch.randn(3, 1, 4), {"mode": "strict", "kernels": {"matmul": "cpu.reference"}}
    with torch._dynamo.config.patch(allow_rnn=True), xt.kernel_policy(strict), torch.no_grad():
        for layer in (torch.nn.GRU(4, 4), torch.nn.LSTM(4, 4, proj_size=2)):
            xrt.clear_decisions()
            torch.compile(layer)(x)
            assert served()
        with pytest.raises(Exception, match=r"would bypass it. lstm: its products"):
            torch.compile(torch.nn.LSTM(4, 4))(x)


def test_norms_that_torch_func_differentiates_are_fused_as_is_said():
    layer = torch.nn.LayerNorm(8)
    parameters, x = dict(layer.named_parameters()), torch.randn(3, 8)

    def gradients(parameters, x):
        return torch.func.grad(lambda p: torch.func.functional_call(layer, p, (x,)).square().sum())(parameters)

    expected = gradients(parameters, x)
    compiled = torch.compile(gradients, fullgraph=True)
    with (
        xt.kernel_policy(layer_norm="cpu.vectorised"),
        pytest.warns(XpuRuntimeWarning, match=r"layer_norm in a gradient of torch.func"),
    ):
        found = compiled(parameters, x)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)
    strict = xrt.Policy(mode="strict", kernels={"layer_norm": "cpu.vectorised"})
    with xt.kernel_policy(strict), pytest.raises(Exception, match=r"layer_norm in a gradient of torch.func"):
        compiled(parameters, x)
    # vmap alone is no derivative: the kernel serves.
    with xt.kernel_policy(strict):
        xrt.clear_decisions()
        torch.testing.assert_close(torch.compile(torch.func.vmap(layer))(x), layer(x))
    assert "cpu.vectorised" in served()


class Compilations:
    """A backend that counts what it compiles."""

    def __init__(self):
        self.count = 0

    def __call__(self, graph, example):
        del example
        self.count += 1
        return graph.forward

    def of(self, run, policy=None):
        before = self.count
        with contextlib.nullcontext() if policy is None else xt.kernel_policy(policy):
            run()
        return self.count - before


def norm_policy(kernel, **more):
    return xrt.Policy(kernels={"layer_norm": kernel, **more})


def test_code_of_a_policy_that_returns_runs_again():
    compiled = Compilations()
    norm = torch.compile(torch.nn.LayerNorm(8), backend=compiled)
    other = torch.compile(lambda x: x.sin() * 2, backend=compiled)
    x = torch.randn(2, 8)

    def run():
        norm(x)
        other(x)

    policies = [None, norm_policy("cpu.vectorised"), norm_policy("cpu.reference"), REFERENCE]
    assert [compiled.of(run, policy) for policy in policies] == [2, 2, 2, 2]
    assert [compiled.of(run, policy) for policy in (*policies, *policies[::-1])] == [0] * 8


def test_each_policy_has_pytorchs_limit_of_variants():
    compiled = Compilations()
    step = torch.compile(lambda x, n: x * n, backend=compiled, dynamic=False)
    x = torch.randn(2, 8)

    def run():
        for n in range(4):
            step(x, n)

    policies = [norm_policy(kernel) for kernel in ("cpu.vectorised", "cpu.reference", "torch")]
    with torch._dynamo.config.patch(recompile_limit=4, fail_on_recompile_limit_hit=True):
        assert [compiled.of(run, policy) for policy in (*policies, *policies)] == [4, 4, 4, 0, 0, 0]


def test_compiled_code_of_many_policies_is_not_kept_for_ever():
    compiled = Compilations()
    norm = torch.compile(torch.nn.LayerNorm(8), backend=compiled)
    x = torch.randn(2, 8)
    policies = [norm_policy(["cpu.reference", f"plugin.number_{n}"]) for n in range(30)]
    for policy in policies:
        assert compiled.of(lambda: norm(x), policy) == 1
        assert len(CONTEXT.compiled_keys) <= 8
    assert compiled.of(lambda: norm(x), policies[0]) == 1


def test_code_compiled_before_this_package_is_imported_obeys_it():
    program = """
import torch
layer = torch.nn.LayerNorm(8)
compiled = []
run = torch.compile(layer, backend=lambda graph, example: (compiled.append(1), graph.forward)[1])
x = torch.randn(2, 8)
run(x)
import xpuruntime as xrt, xpuruntime.pytorch as xt
for _ in range(3):
    with xt.kernel_policy(layer_norm="cpu.reference"):
        run(x)
    run(x)
print(len(compiled), sum(one.count for one in xrt.decisions()))
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["3", "3"], done.stderr
