# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Rules of a phase and of a module in code that `torch.compile` has compiled: each call knows what it is part of."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
import uuid
import warnings

import pytest

import xpuruntime as xrt
from xpuruntime.errors import PolicyError, XpuRuntimeWarning

torch = pytest.importorskip("torch")
xt = pytest.importorskip("xpuruntime.pytorch")

from torch.utils.checkpoint import checkpoint  # noqa: E402 - it needs PyTorch

from xpuruntime.pytorch import module_paths  # noqa: E402

F = torch.nn.functional

pytestmark = [
    pytest.mark.torch,
    pytest.mark.usefixtures("no_policy_is_left"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of PyTorch's compiler, on loading
]


@pytest.fixture(autouse=True)
def _compiled_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    yield
    xt.clear_kernel_policy()
    torch._dynamo.reset()


class Block(torch.nn.Module):
    """With a product, a norm, a batched product and a convolution."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.inner = torch.nn.Linear(8, 8)
        self.conv = torch.nn.Conv1d(4, 4, 3, padding=1)

    def forward(self, x):
        h = self.inner(self.norm(x)).view(2, 4, 8)
        return x + self.conv(torch.bmm(h, h.transpose(1, 2)) @ h).view(8, 8).tanh()


class Attending(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(8, 8)

    def forward(self, x):
        q = self.qkv(x).view(1, 2, 4, 8)
        return F.scaled_dot_product_attention(q, q, q).view(8, 8)


def strict(*rules):
    return xrt.Policy(mode="strict", kernels=xrt.KernelPolicy(rules=list(rules)))


def rule(use="cpu.reference", **match):
    return {"match": match, "use": use}


def gradients(run, model, x):
    return torch.autograd.grad(run(x).square().mean(), (x, *model.parameters()))


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def served(run):
    """What ran in the second call of `run`, by operator, module and phase."""
    run()
    with xt.explain() as found:
        run()
    return {
        (row.operator.removeprefix("aten::").removeprefix("xpuruntime::"), row.module, row.phase): row.resolved
        for row in found.rows
        if row.op
    }


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


@pytest.mark.parametrize("phase", ["train", "backward", "infer"])
def test_rules_of_a_phase_hold(phase):
    model, x = torch.nn.Sequential(Block(), Block()), torch.randn(8, 8, requires_grad=True)
    run = torch.compile(model, fullgraph=True)

    def both():
        gradients(run, model, x)
        with torch.no_grad():
            run(x)

    with xt.kernel_policy(strict(*(rule(op=op, phase=phase) for op in ("matmul", "conv")))):
        found = served(both)
    ours = {call for call, kernel in found.items() if kernel == "cpu.reference"}
    products = {"train": "addmm", "infer": "addmm", "backward": "mm"}
    assert {(products[phase], ""), ("bmm", "")} <= {(operator, "") for operator, _, _ in ours}
    assert {at for _, _, at in ours} == {phase}
    assert all(
        kernel == "cpu.reference" for (name, _, at), kernel in found.items() if at == phase and name != "compiled"
    )


def test_one_module_has_rules_for_each_phase():
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)), torch.randn(4, 8, requires_grad=True)
    run = torch.compile(model, fullgraph=True)
    rules = (rule(module="1", phase="train"), rule("cpu.blas", module="1", phase="backward"))
    with xt.kernel_policy(strict(*rules)):
        found = served(lambda: gradients(run, model, x))
    assert found["addmm", "1", "train"] == "cpu.reference"
    assert found["mm", "1", "backward"] == "cpu.blas"
    assert found["addmm", "0", "train"] == found["mm", "0", "backward"] == "torch.mm"


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
    model, x = torch.nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
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
    assert compiled(rule(op="matmul", phase="train"), rule("cpu.blas", op="matmul", module="1")) == 0


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


def test_a_pass_of_the_users_comes_first_and_stays():
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Counting(CustomGraphPass):
        seen: tuple[int, ...] = ()

        def __call__(self, graph):
            Counting.seen += (sum("within" in str(node.target) for node in graph.nodes),)

        def uuid(self):
            return uuid.uuid4().hex  # nothing comes from a cache

    mine = Counting()
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8)), torch.randn(4, 8, requires_grad=True)
    for options in ({"post_grad_custom_pre_pass": mine}, {}):
        Counting.seen = ()
        torch._dynamo.reset()
        with (
            config.patch(post_grad_custom_pre_pass=None if options else mine),
            xt.kernel_policy(strict(rule(module="*"))),
        ):
            run = torch.compile(model, fullgraph=True, options=options)
            gradients(run, model, x)
            assert Counting.seen == (0, 0)
            assert config.post_grad_custom_pre_pass is (None if options else mine)
    assert {one.chosen for one in xrt.decisions()} == {"cpu.reference"}


def test_a_pass_of_the_users_need_not_say_what_its_nodes_are_like():
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Cloning(CustomGraphPass):
        def __call__(self, graph):
            for node in list(graph.nodes):
                if node.target is torch.ops.aten.convolution.default:
                    with graph.inserting_before(node):
                        node.update_arg(0, graph.call_function(torch.ops.aten.clone.default, (node.args[0],)))

        def uuid(self):
            return uuid.uuid4().hex

    model, x = torch.nn.Sequential(torch.nn.Conv1d(4, 4, 3)), torch.randn(2, 4, 8, requires_grad=True)
    run = torch.compile(model, fullgraph=True, options={"post_grad_custom_pre_pass": Cloning()})
    expected = gradients(model, model, x)
    with xt.kernel_policy(strict(rule(op="conv", module="0"))):
        torch.testing.assert_close(gradients(run, model, x), expected)
    assert {one.chosen for one in xrt.decisions()} == {"cpu.reference"}


def test_attention_of_modules_compiled_one_by_one_is_said_or_refused():
    model = torch.nn.Sequential(Attending(), Attending())
    alone = torch.nn.Sequential(Attending(), torch.nn.Linear(8, 8))
    asked = rule(op="attention", module="1")
    x = torch.randn(8, 8)

    def regional(model):
        return torch.nn.Sequential(torch.compile(model[0]), *model[1:])

    with xt.kernel_policy(rules=[asked]), pytest.warns(XpuRuntimeWarning, match=r"attention in 0: which kernel serves"):
        regional(model)(x)
    with xt.kernel_policy(strict(asked)), pytest.raises(Exception, match="compile the model around it") as refused:
        regional(copy.deepcopy(model))(x)
    assert "PolicyError" in str(refused.value) or isinstance(refused.value, PolicyError)
    with xt.kernel_policy(strict(rule(op="attention", module="0"))), warnings.catch_warnings():
        warnings.simplefilter("error", XpuRuntimeWarning)
        regional(alone)(x)  # no other module has its code
        torch.compile(model, fullgraph=True)(x)  # the path of each is built in
    with xt.kernel_policy(strict(rule(op="matmul", module="1"))):
        regional(model)(x)  # products say where they are when they run


def test_the_phase_is_that_of_eager_code_where_gradients_are_switched_off_or_nothing_needs_one():
    model, teacher = torch.nn.Sequential(torch.nn.Linear(8, 8)), torch.nn.Sequential(torch.nn.Linear(8, 8))
    x = torch.randn(4, 8, requires_grad=True)

    def step(x):
        with torch.no_grad():
            wanted = teacher(x)
        return (model(x) - wanted).square().mean()

    frozen = torch.nn.Sequential(torch.nn.Linear(8, 8)).requires_grad_(False)
    rules = (rule(op="matmul", phase="infer"), rule("cpu.blas", op="matmul", module="0", phase="train"))
    for run in (step, lambda x: frozen(x.detach())):
        with xt.kernel_policy(strict(*rules)):
            eager = served(lambda run=run: run(x))
            torch._dynamo.reset()
            compiled = torch.compile(run, fullgraph=True)
            assert served(lambda run=compiled: run(x)) == eager


def test_a_backward_under_autocast_has_the_types_it_was_compiled_for():
    model, x = torch.nn.Sequential(Block(), Block()), torch.randn(8, 8, requires_grad=True)
    run = torch.compile(model, fullgraph=True)
    leaves = [x, *model.parameters()]
    expected = torch.autograd.grad(model(x).square().mean(), leaves)
    with xt.kernel_policy(strict(rule(module="1.*"))):
        for _ in range(2):
            loss = run(x).square().mean()
            with torch.autocast("cpu", torch.bfloat16):
                found = torch.autograd.grad(loss, leaves)
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", ["other name", "decorated", "method", "function"])
def test_paths_do_not_depend_on_how_the_compiled_code_is_written(kind):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = torch.nn.ModuleDict({"x[0]": torch.nn.Linear(8, 8), "y": torch.nn.Linear(8, 8)})

        def forward(this, x):  # noqa: N805 - Dynamo calls it by this name
            return this.parts["y"](this.parts["x[0]"](x).tanh())

    if kind == "decorated":
        plain = Model.forward
        Model.forward = lambda *args, **more: plain(*args, **more)
    model, x = Model(), torch.randn(4, 8, requires_grad=True)

    class Trainer:
        model = None

        def step(self, x):
            return self.model(x)

    trainer = Trainer()
    trainer.model = model
    run = {"method": trainer.step, "function": lambda x: model(x)}.get(kind, model)
    with xt.kernel_policy(strict(rule(module="parts.y"))):
        eager = served(lambda: run(x).sum().backward())
        torch._dynamo.reset()
        compiled = torch.compile(run)
        assert served(lambda: compiled(x).sum().backward()) == eager
    assert eager["addmm", "parts.y", "train"] == eager["mm", "parts.y", "backward"] == "cpu.reference"


def test_a_region_that_is_called_for_several_modules_is_said_or_refused():
    class Region(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(8, 8)

        @torch.compiler.nested_compile_region
        def forward(self, x):
            return self.inner(x).tanh()

    x = torch.randn(4, 8)
    asked = rule(op="matmul", module="1.inner")
    with xt.kernel_policy(strict(asked)), pytest.raises(Exception, match="matmul in a region of nested_compile_region"):
        torch.compile(torch.nn.Sequential(*(Region() for _ in range(3))), fullgraph=True)(x)
    with xt.kernel_policy(strict(asked)):
        torch.compile(torch.nn.Sequential(torch.nn.Tanh(), Region()), fullgraph=True)(x)


def test_a_module_that_runs_while_another_thread_compiles_is_left_again():
    x, started, done = torch.randn(4, 8), threading.Event(), threading.Event()
    left = []

    class Waiting(torch.nn.Module):
        def forward(self, x):
            started.set()
            done.wait(60)
            return x

    def other():
        torch.nn.Sequential(Waiting())(x)
        left.append(module_paths.running())

    def slowly(graph, _):
        thread.start()
        assert started.wait(60)
        return graph

    thread = threading.Thread(target=other)
    with xt.kernel_policy(strict(rule(module="*"))):
        try:
            torch.compile(torch.nn.Sequential(torch.nn.Linear(8, 8)), backend=slowly)(x)
        finally:
            done.set()
            thread.join()
    assert left == [""]


def test_a_module_that_runs_the_backward_itself_is_not_what_it_is_of():
    class Trainer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = torch.compile(torch.nn.Sequential(torch.nn.Linear(8, 8)), fullgraph=True)

        def forward(self, x):
            return torch.autograd.grad(self.model(x).square().mean(), (x, *self.model.parameters()))

    trainer, x = Trainer(), torch.randn(4, 8, requires_grad=True)
    with xt.kernel_policy(strict(rule(module="model.0"))):
        found = served(lambda: trainer(x))
    assert {(name, module): kernel for (name, module, _), kernel in found.items()} == {
        ("addmm", "model.0"): "cpu.reference",
        ("mm", "model.0"): "cpu.reference",
    }


def test_inference_mode_and_a_compiled_function():
    model, x = torch.nn.Sequential(Block(), Block()), torch.randn(8, 8)

    @torch.compile(fullgraph=True)
    def run(x):
        return model(x) @ x.T

    with xt.kernel_policy(strict(rule(module="1.inner", phase="infer"))), torch.inference_mode():
        torch.testing.assert_close(run(x), model(x) @ x.T)
        found = served(lambda: run(x))
    assert {call for call, kernel in found.items() if kernel == "cpu.reference"} == {("addmm", "1.inner", "infer")}
