# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Private names of PyTorch's: each is there, does what it is used for, and has a reason and something to do without it.

Runs alone against any PyTorch: ``pytest tests/unit/pytorch/test_private_api.py``.
"""

from __future__ import annotations

import ast
import importlib
import re
import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from import_graph import dotted_name, syntax_nodes  # noqa: E402

import xpuruntime  # noqa: E402
from xpuruntime.errors import UnsupportedOperationError  # noqa: E402
from xpuruntime.pytorch import _private_api as private  # noqa: E402
from xpuruntime.pytorch._private_api import lookup  # noqa: E402

pytest.importorskip("torch")

pytestmark = pytest.mark.torch

PACKAGE = Path(xpuruntime.__file__).parent
#: What a CPU-only build or an older release has not, each with its fallback in the module.
OPTIONAL = {
    "torch._dynamo.functional_export.get_traced_fn",
    "torch.nn.attention.varlen._should_use_cudnn",  # from 2.14 on
    "torch._C._cuda_customAllocator",
    "torch._C._cuda_endAllocateToPool",
    "torch._C._cuda_getCurrentRawStream",
    "torch._C._cuda_hasPrimaryContext",
    "torch._C._cuda_releasePool",
}
#: What objects have and their classes have not: see `test_attributes_of_objects`.
OF_OBJECTS = {
    "torch._dynamo.repro.after_dynamo.WrapBackendDebug._compiler_name",
    "torch.amp.GradScaler._per_optimizer_states",
    "torch.compiler.disable._torchdynamo_orig_callable",
    "torch.nn.Module._backward_hooks",
    "torch.nn.Module._backward_pre_hooks",
    "torch.nn.Module._forward_hooks",
    "torch.nn.Module._forward_pre_hooks",
    "torch.nn.Module._is_replica",
    "torch.nn.Module._modules",
    "torch.optim.Optimizer._opt_called",  # set by a scheduler
    "torch.optim.Optimizer._step_supports_amp_scaling",
    "torch.optim.Optimizer._warned_capturable_if_run_uncaptured",  # set by a step
}


@pytest.mark.parametrize("one", private.TABLE, ids=lambda one: one.path)
def test_each_is_there_and_says_why(one):
    assert one.why
    assert one.without
    if one.path not in OPTIONAL | OF_OBJECTS:
        assert lookup.find(one.path) is not lookup.NOT_FOUND


def test_names_are_listed_once():
    paths = [one.path for one in private.TABLE]
    assert len(paths) == len(set(paths))


def test_what_is_missing_is_refused_where_it_is_used_or_replaced():
    refusing = lookup.take("torch._C._there_is_none", "which nobody has")
    assert private.TABLE.pop().path == "torch._C._there_is_none"
    with pytest.raises(UnsupportedOperationError, match=r"has no torch\._C\._there_is_none, which nobody has"):
        refusing(1)
    other = lookup.take("torch._C._there_is_none", "which nobody has", without="nothing", otherwise=lambda: 7)
    private.TABLE.pop()
    assert other() == 7


def test_autograd():
    assert private.running_backward() == -1
    assert private.running_node() is None
    seen = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            seen.append((private.running_backward(), private.running_node()))
            return 2 * grad

    before = private.next_node()
    made = Twice.apply(torch.ones(1, requires_grad=True))
    made.backward()
    assert seen[0][0] >= 0
    assert seen[0][1][0] == before == made.grad_fn._sequence_nr()
    assert private.any_requires_grad(torch.ones(1, requires_grad=True))
    assert not private.any_requires_grad(torch.ones(1))


def test_the_dispatcher():
    keys = private.dispatch_keyset(private.dispatch_key("CPU"))
    kernel = torch.library.get_kernel("aten::mm", "CPU")
    a = torch.randn(3, 3)
    assert torch.equal(kernel.call_boxed(keys, a, a), a @ a)
    assert "RegisterCPU" in private.dispatch_table("aten::mm")
    assert private.has_kernel("aten::mm", "CPU")
    assert private.dispatch_modes() == 0
    assert private.tracing_state() is None
    assert not private.is_functional(a)
    assert not private.has_transforms()
    assert torch.func.vmap(lambda x: x * (1 if private.has_transforms() else torch.nan))(a).equal(a)
    assert private.forward_level() == -1
    with torch.autograd.forward_ad.dual_level():
        assert private.forward_level() == 0


@pytest.mark.skipif(isinstance(vars(torch.autograd.Function)["apply"], classmethod), reason="apply is in Python")
def test_apply_looks_up_the_class_of_its_node_and_then_the_forward(monkeypatch):
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

    def look_up(cls, name):
        seen.append((name, torch.is_grad_enabled()))
        return type.__getattribute__(cls, name)

    seen, apply = [], Double.apply
    monkeypatch.setattr(type(Double), "__getattribute__", look_up, raising=False)
    apply(torch.ones(1))
    assert [one for one in seen if one[0] in (private.NODE_CLASS, "forward")] == [
        (private.NODE_CLASS, True), ("forward", False),
    ]  # fmt: skip


def test_backends_of_attention():
    assert len(private.sdp_getters) == len(private.sdp_setters) == 5
    q = torch.randn(1, 2, 4, 8)
    assert private.sdp_choice(q, q, q) in range(5)
    for get, put in zip(private.sdp_getters, private.sdp_setters, strict=True):
        before = get()
        try:
            put(not before)
            assert get() is not before
        finally:
            put(before)
    assert sorted(private.sdp_order()) == list(range(len(private.sdp_order())))


def test_handles_of_tensors_are_owned_by_what_they_become():
    x = torch.ones(3)
    count = x._use_count()
    for _ in range(3):
        (same,) = private.tensors_of_handles(private.handles_of_tensors([x]))
        assert same is x
    del same
    assert x._use_count() == count


def test_switches_agree_with_the_public_ones():
    assert private.is_deterministic() is torch.are_deterministic_algorithms_enabled()
    assert private.fp32_precision("generic", "all") in ("none", "ieee", "tf32")
    out = torch.empty(0)
    private.resize_out()(out, torch.Size((2, 3)))
    assert out.shape == (2, 3)


def test_attributes_of_objects():
    x, linear = torch.zeros(2), torch.nn.Linear(2, 2)
    before = private.tensor_version(x)
    x += 1
    assert private.tensor_version(x) == before + 1
    assert private.is_zero_tensor(torch._efficientzerotensor((2,)))
    assert not private.is_zero_tensor(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a prototype
        parts = torch.nested.nested_tensor([x, x[:1]])
    assert private.nested_sizes(parts).tolist() == [[2], [1]]
    assert private.child_modules(torch.nn.Sequential(linear, linear)) == {"0": linear, "1": linear}
    linear.register_forward_pre_hook(hook := lambda *_: None)
    assert list(private.forward_pre_hooks(linear).values()) == [hook]
    assert not private.is_replica(linear)
    assert isinstance(private.global_module_hooks(), list)
    assert private.operator_schema(torch.ops.aten.mm.default).name == "aten::mm"
    assert private.operator_name(torch.ops.aten.mm.default) == "mm"
    assert (private.operator_schema(len), private.operator_name(len)) == (None, "")
    assert not private.steps_with_scaler(torch.optim.SGD(linear.parameters()))
    assert private.steps_with_scaler(torch.optim.SGD(linear.parameters(), fused=True))
    assert private.scaler_states(torch.amp.GradScaler("cpu")) == {}
    assert private.compiled_function(torch.compiler.disable(hook)) is hook
    assert private.compiled_function(hook) is None
    assert not private.profiler_flag()
    with pytest.raises(UnsupportedOperationError, match=r"has no torch\.Tensor\._version"):
        private.tensor_version(1)


def test_messages_are_those_of_this_pytorch():
    x = torch.ones(1, requires_grad=True)
    y = x.exp()
    y.backward()
    with pytest.raises(RuntimeError) as second:
        y.backward()
    assert lookup.is_second_backward(second.value)
    assert not lookup.is_capture_error(second.value)
    q = torch.ones(1, 2, 4, 8)
    on_cuda = torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.CUDNN_ATTENTION])
    with on_cuda, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeError) as none:
            torch.nn.functional.scaled_dot_product_attention(q, q, q)
    assert lookup.has_no_sdp_backend(none.value)
    assert lookup.sdp_reasons(["A not used because:", "B (Triggered internally at x)", "C"]) == [
        ("A not used because:", "B")
    ]
    library, kernels = (torch.library.Library("private_api_test", kind) for kind in ("DEF", "IMPL"))
    library.define("one(Tensor x) -> Tensor")
    kernels.impl("one", lambda x: x, "CPU")
    call = torch.library.get_kernel("private_api_test::one", "CPU").call_boxed
    keys = private.dispatch_keyset(private.dispatch_key("CPU"))
    private.remove_library(kernels)
    with pytest.raises(RuntimeError) as gone:
        call(keys, x)
    private.remove_library(library)
    assert lookup.is_kernel_gone(gone.value)


PRIVATE_NAME = re.compile(r"\btorch\._[a-zA-Z](?!\w*__)|from torch(\.\w+)*\._\w|from torch[\w.]* import _\w")
#: Documented by PyTorch; Dynamo knows them by these names where it traces them.
DOCUMENTED = ("torch._dynamo", "torch._dynamo.mark_static", "torch._dynamo.graph_break")
BY_NAME = re.compile(r"(?:get|set|has)attr\(\w[^,]*, '(_\w+)'")
#: Copied into interpreters that have no xpuruntime.
COPIED = {"native_config.py", "native_worker.py"}


def test_what_the_core_asks_for_is_there():
    sources = Path(__file__).resolve().parents[3] / "src" / "cpp"
    names = {
        name for path in sources.rglob("*.cpp") for name in re.findall(r'private_api\("(\w+)"\)', path.read_text())
    }
    assert "next_node" in names
    assert [name for name in sorted(names) if not hasattr(private, name)] == []


def test_no_other_module_uses_a_private_name():
    texts = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.parent.name == "_private_api" or path.name in COPIED:
            continue
        for node in syntax_nodes(path) if "torch" in path.read_text() else ():
            if isinstance(node, (ast.Import, ast.ImportFrom, ast.Attribute)):
                text = dotted_name(node) if isinstance(node, ast.Attribute) else ast.unparse(node)
                if PRIVATE_NAME.search(text) and text not in DOCUMENTED and "xpuruntime" not in text:
                    texts.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {text}")
    assert texts == []


def test_no_other_module_uses_a_private_attribute():
    names, texts = attributes_of_pytorch(), []
    for path in sorted([*(PACKAGE / "pytorch").rglob("*.py"), *(PACKAGE / "engines" / "torch").rglob("*.py")]):
        if path.parent.name == "_private_api" or path.name in COPIED:
            continue
        for node in syntax_nodes(path):
            used = False
            if isinstance(node, ast.Attribute) and node.attr in names and dotted_name(node) not in DOCUMENTED:
                owner = ast.unparse(node.value)
                used = owner not in ("self", "cls") and not owner.startswith("torch.ops.")
            elif isinstance(node, ast.Call) and dotted_name(node.func) in ("getattr", "setattr", "hasattr"):
                match = BY_NAME.match(ast.unparse(node))
                used = match is not None and match[1] in names
            if used:
                texts.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}")
    assert texts == []


def attributes_of_pytorch() -> set[str]:
    """Return the names of private attributes of the objects of PyTorch that programs get."""
    linear = torch.nn.Linear(1, 1)
    objects = (
        torch, torch.cuda, torch.cuda.memory, torch.cuda.CUDAGraph, torch.cuda.MemPool, torch.autograd.Function,
        torch.autograd.profiler, torch.profiler.profile, torch.library.Library, torch.ops.aten.mm.default, torch.Tensor,
        torch.UntypedStorage, torch.Generator, torch.fx.Node, torch.fx.Graph, torch.fx.GraphModule,
        torch.export.ExportedProgram, torch.amp.GradScaler("cpu"), torch.optim.SGD(linear.parameters()), linear,
        torch.optim.lr_scheduler.LRScheduler, torch.ones(1, requires_grad=True).sum().grad_fn,
        torch.compiler.disable(len), torch.nn.modules.module, torch.utils.checkpoint,
    )  # fmt: skip
    return {name for obj in objects for name in dir(obj) if name.startswith("_") and not name.startswith("__")}


_SOURCES = Path(__file__).parents[3] / "src/cpp/torch"


_IMPORT = re.compile(r'imported\(\s*"([\w.]+)",\s*"(\w+)"\)')


def test_what_the_addon_imports_is_there() -> None:
    found = {match for path in _SOURCES.rglob("*.cpp") for match in _IMPORT.findall(path.read_text())}
    assert len(found) > 3, "the pattern finds none of them"
    for module, name in sorted(found):
        assert callable(getattr(importlib.import_module(module), name, None)), f"{module} has no {name}"
