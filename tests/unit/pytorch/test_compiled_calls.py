# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Rules of a phase and of a module in code that `torch.compile` has compiled: each call knows what it is part of."""

from __future__ import annotations

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from compiled_blocks import Block, gradients, rule, served, strict  # noqa: E402 - it needs PyTorch
from torch.utils.checkpoint import checkpoint  # noqa: E402

import xpuruntime.pytorch as xt  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.usefixtures("no_policy_is_left", "inductor_is_new"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of PyTorch's compiler, on loading
]


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("dynamic", [False, True])
def test_rules_of_a_module_hold_forward_and_backward(dynamic):
    model, x = torch.nn.Sequential(Block(), Block()), torch.randn(8, 8, requires_grad=True)
    expected = gradients(model, model, x)
    run = torch.compile(model, fullgraph=True, dynamic=dynamic)
    with xt.kernel_policy(strict(*(rule(op=op, module="1.*") for op in ("matmul", "layer_norm", "conv")))):
        torch.testing.assert_close(gradients(run, model, x), expected)
        found = served(lambda: gradients(run, model, x))
    ours = {call for call, kernel in found.items() if kernel == "cpu.reference"}
    assert {
        ("addmm", "1.inner", "train"),
        ("mm", "1.inner", "backward"),
        ("layer_norm", "1.norm", "train"),
        ("layer_norm_backward", "1.norm", "backward"),
        ("convolution", "1.conv", "train"),
        ("convolution_backward", "1.conv", "backward"),
    } <= ours
    assert {module for _, module, _ in ours} <= {"1.inner", "1.norm", "1.conv"}
    assert {("addmm", "0.inner", "train"), ("mm", "0.inner", "backward"), ("bmm", "1", "train")} <= found.keys()


def test_rules_of_a_phase_hold():
    model, x = torch.nn.Sequential(Block()), torch.randn(8, 8, requires_grad=True)
    run = torch.compile(model, fullgraph=True)

    def both():
        gradients(run, model, x)
        with torch.no_grad():
            run(x)

    for phase, product in (("train", "addmm"), ("backward", "mm"), ("infer", "addmm")):
        with xt.kernel_policy(strict(*(rule(op=op, phase=phase) for op in ("matmul", "conv")))):
            found = served(both)
        ours = {call for call, kernel in found.items() if kernel == "cpu.reference"}
        assert {product, "bmm"} <= {operator for operator, _, _ in ours}
        assert {at for _, _, at in ours} == {phase}
        assert all(
            kernel == "cpu.reference" for (name, _, at), kernel in found.items() if at == phase and name != "compiled"
        )


@pytest.mark.parametrize("by_method", [False, True])
def test_modules_that_share_compiled_code_have_their_own_rules(by_method):
    blocks = [Block() for _ in range(3)]
    if by_method:
        for block in blocks:
            block.compile(fullgraph=True)
    model = torch.nn.Sequential(*(block if by_method else torch.compile(block, fullgraph=True) for block in blocks))
    x = torch.randn(8, 8, requires_grad=True)
    before = graphs()
    with xt.kernel_policy(strict(rule(module="1.inner"), rule(module="2.norm"))):
        gradients(model, model, x)
        assert graphs() - before < len(blocks)  # or nothing is tested here
        found = served(lambda: gradients(model, model, x))
    assert {call for call, kernel in found.items() if kernel == "cpu.reference"} == {
        ("addmm", "1.inner", "train"),
        ("mm", "1.inner", "backward"),
        ("layer_norm", "2.norm", "train"),
        ("layer_norm_backward", "2.norm", "backward"),
    }


def test_models_of_the_same_code_and_other_names_share_nothing_on_disk():
    x = torch.randn(4, 8, requires_grad=True)
    with xt.kernel_policy(strict(rule(module="*b"))):
        for names, expected in (("ab", "b"), ("cd", None)):
            layers = {name: torch.nn.Linear(8, 8) for name in names}
            model = torch.nn.Sequential()
            for name, layer in layers.items():
                model.add_module(name, layer)
            torch._dynamo.reset()
            run = torch.compile(model, fullgraph=True)
            found = served(lambda run=run, model=model: gradients(run, model, x))
            ours = {module for (_, module, _), kernel in found.items() if kernel == "cpu.reference"}
            assert ours == ({expected} if expected else set())


_PROGRAM = """
import sys, torch, xpuruntime as xrt, xpuruntime.pytorch as xt
from torch._dynamo.utils import counters
torch.manual_seed(0)
model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)), torch.randn(4, 8)
match = {"module": "*", "phase": "train"}
rules = [{"match": {"op": op, **match}, "use": "cpu.reference"} for op in ("matmul", "layer_norm")]
with xt.kernel_policy(xrt.Policy(mode="strict", kernels=xrt.KernelPolicy(rules=rules))):
    torch.compile(model, fullgraph=True)(x).sum().backward()
print(sorted((one.op, one.count) for one in xrt.decisions() if one.chosen == "cpu.reference"))
print(counters["aot_autograd"]["autograd_cache_hit"])
"""


def test_code_from_the_cache_of_another_process_states_the_same():
    first, second = (
        subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True).stdout.splitlines()
        for _ in range(2)
    )
    assert first == ["[('layer_norm', 1), ('matmul', 1)]", "0"]
    assert second == [first[0], "1"]


def test_only_another_question_of_rules_compiles_anew():
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8)), torch.randn(4, 8, requires_grad=True)
    run = torch.compile(model, fullgraph=True)

    def compiled(*rules):
        before = graphs()
        xt.set_kernel_policy(strict(*rules))
        gradients(run, model, x)
        return graphs() - before

    assert compiled(rule(op="matmul", m=4)) == 1
    assert compiled(rule(op="matmul", phase="train")) == 1
    assert compiled(rule("cpu.blas", op="matmul", phase="backward", m=4)) == 0
    assert compiled(rule(op="matmul", phase="train"), rule(op="matmul", module="0")) == 1
    assert compiled(rule(op="matmul", phase="train"), rule("cpu.blas", op="matmul", module="0*")) == 0


def test_a_checkpoint_that_computes_its_forward_again_is_of_its_module():
    class Kept(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()

        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=False)

    model, x = Kept(), torch.randn(8, 8, requires_grad=True)
    run = torch.compile(model, fullgraph=True)
    with xt.kernel_policy(strict(rule(module="block.inner", phase="train"))):
        found = served(lambda: gradients(run, model, x))
    assert found["addmm", "block.inner", "train"] == "cpu.reference"
    assert found["mm", "block.inner", "backward"] == "torch.mm"
