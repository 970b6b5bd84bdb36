# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Calls in compiled code know what they are part of however it is written, and beside what else a program does."""

from __future__ import annotations

import copy
import threading
import uuid
import warnings

import pytest

torch = pytest.importorskip("torch")

from compiled_blocks import Block, gradients, rule, served, strict  # noqa: E402 - it needs PyTorch

import xpuruntime as xrt  # noqa: E402
import xpuruntime.pytorch as xt  # noqa: E402
from xpuruntime.errors import PolicyError, XpuRuntimeWarning  # noqa: E402
from xpuruntime.pytorch.call_scope import module_paths  # noqa: E402
from xpuruntime.pytorch.compiler import compile_hooks  # noqa: E402
from xpuruntime.pytorch.dispatch import context  # noqa: E402

F = torch.nn.functional

pytestmark = [
    pytest.mark.torch,
    pytest.mark.usefixtures("no_policy_is_left", "inductor_is_new"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of PyTorch's compiler, on loading
]


class Attending(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(8, 8)

    def forward(self, x):
        q = self.qkv(x).view(1, 2, 4, 8)
        return F.scaled_dot_product_attention(q, q, q).view(8, 8)


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
    assert {decision.chosen for decision in xrt.decisions()} == {"cpu.reference"}


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
    assert {decision.chosen for decision in xrt.decisions()} == {"cpu.reference"}


def test_attention_of_modules_compiled_one_by_one_is_said_or_refused():
    model = torch.nn.Sequential(Attending(), Attending())
    alone = torch.nn.Sequential(Attending(), torch.nn.Linear(8, 8))
    asked = rule(op="attention", module="1")
    x = torch.randn(8, 8)

    def regional(model):
        return torch.nn.Sequential(torch.compile(model[0]), *model[1:])

    with xt.kernel_policy(rules=[asked]), pytest.warns(XpuRuntimeWarning, match=r"attention in 0: which kernel serves"):
        regional(model)(x)
    with pytest.raises(Exception, match="compile the model around it") as refused, xt.kernel_policy(strict(asked)):
        regional(copy.deepcopy(model))(x)
    assert "PolicyError" in str(refused.value) or isinstance(refused.value, PolicyError)
    with xt.kernel_policy(strict(rule(op="attention", module="0"))), warnings.catch_warnings():
        warnings.simplefilter("error", XpuRuntimeWarning)
        regional(alone)(x)  # no other module has its code
        torch.compile(model, fullgraph=True)(x)  # the path of each is built in
    with xt.kernel_policy(strict(rule(op="matmul", module="1.qkv"))):
        regional(model)(x)  # products say where they are when they run


def test_phase_of_compiled_code_under_no_grad_and_without_required_gradients():
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
    model, x = torch.nn.Sequential(Block()), torch.randn(8, 8, requires_grad=True)
    run = torch.compile(model, fullgraph=True)
    leaves = [x, *model.parameters()]
    expected = torch.autograd.grad(model(x).square().mean(), leaves)
    with xt.kernel_policy(strict(rule(module="0.*"))):
        for _ in range(2):
            loss = run(x).square().mean()
            with torch.autocast("cpu", torch.bfloat16):
                grad = torch.autograd.grad(loss, leaves)
            torch.testing.assert_close(grad, expected)


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


@pytest.mark.parametrize("change", ["enter", "exit", "lose", "set", "clear"])
def test_dynamo_is_not_reset_while_it_is_imported(change, monkeypatch):
    """The reset would wait for the import, which may wait for the change."""
    policy, resets = {"layer_norm": "cpu.reference"}, []
    block = xt.kernel_policy(**policy)
    if change in ("exit", "lose"):
        block.__enter__()
    elif change == "clear":
        xt.set_kernel_policy(**policy)

    monkeypatch.setattr(context.CONTEXT, "unguarded", True)
    monkeypatch.setattr(torch._dynamo.__spec__, "_initializing", True)
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(1))
    if change == "lose":
        del block
    else:
        {
            "enter": block.__enter__,
            "exit": lambda: block.__exit__(None, None, None),
            "set": lambda: xt.set_kernel_policy(**policy),
            "clear": xt.clear_kernel_policy,
        }[change]()
    assert resets == []
    monkeypatch.undo()
    if change == "enter":
        block.__exit__(None, None, None)


def test_all_threads_may_record_graphs_whichever_imports_them(monkeypatch):
    """As with PyTorch before 2.13, where the thread that imports the module has the state alone."""
    from torch._inductor import cudagraph_trees as trees

    monkeypatch.delattr(trees, "_initialize_tls", raising=False)
    monkeypatch.setattr(trees, "get_obj", trees.get_obj)
    compile_hooks._share_graph_trees(trees)
    found = []

    def look():
        for name in ("tree_manager_containers", "tree_manager_locks"):
            first, again = (trees.get_obj(trees.local, name) for _ in range(2))
            assert first is again
            found.append(first)

    for thread in [threading.Thread(target=look) for _ in range(2)]:
        thread.start()
        thread.join()
    look()
    assert len({id(one) for one in found}) == 6
    assert all(found[number] == {} for number in (0, 2))
