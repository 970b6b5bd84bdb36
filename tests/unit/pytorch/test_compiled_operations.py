# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""``compiled``: operations that torch.compile makes one kernel of, for eager calls."""

from __future__ import annotations

import contextlib
import shutil
import warnings

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("xpuruntime.pytorch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import xpuruntime as xrt  # noqa: E402
import xpuruntime.pytorch as xt  # noqa: E402
from xpuruntime.errors import UnsupportedOperationError  # noqa: E402
from xpuruntime.ops.torch_kernels import Saved, environment_values  # noqa: E402
from xpuruntime.pytorch.providers.bound import call_of  # noqa: E402
from xpuruntime.pytorch.providers.compiled import KERNELS  # noqa: E402
from xpuruntime.pytorch.providers.operations import OPERATIONS  # noqa: E402
from xpuruntime.pytorch.providers.operators import perform  # noqa: E402

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler: apt-get install g++")


def _with_gradients(op, operands, attributes, kernel):
    inputs = {
        name: x.detach().requires_grad_(x.is_floating_point() and name not in ("cos", "sin"))
        for name, x in operands.items()
    }
    made = perform(op, inputs, attributes, kernel)
    outputs = made if isinstance(made, tuple) else (made,)
    learned = [x for x in inputs.values() if x.requires_grad]
    grads = [torch.linspace(-1, 1, x.numel()).view(x.shape).to(x) for x in outputs]
    return *outputs, *torch.autograd.grad(outputs, learned, grads, create_graph=kernel == "")


def _by_formulas(op, operands, attributes):
    kernel = next(kernel for kernel in KERNELS if kernel.op == op)
    inputs = tuple(operands.values())
    with torch.compiler.set_stance("force_eager"):
        outputs, extra = kernel.forward(call_of(op, "train", operands, attributes), *inputs)
        grads = [torch.linspace(-1, 1, x.numel()).view(x.shape).to(x) for x in outputs]
        call = call_of(op, "backward", {**operands, "grad": grads[0]}, attributes)
        found = kernel.backward(call, Saved(inputs, tuple(outputs), tuple(extra)), grads)
    return *outputs, *(x for x in found if x is not None)


def _heads(generator, heads):
    return torch.randn(2, 9, heads, 16, generator=generator, dtype=torch.bfloat16).transpose(1, 2)


@pytest.mark.parametrize("op", ["swiglu", "geglu", "cross_entropy", "rope"])
def test_the_formulas_are_those_of_the_operations(op):
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(2, 1, 1, 9, 16, generator=generator)
    operands, attributes = {
        "swiglu": ({"gate": wide[0, 0], "up": wide[1, 0]}, {}),
        "geglu": ({"gate": wide[0, 0], "up": wide[1, 0]}, {"approximate": "tanh"}),
        "rope": ({"q": _heads(generator, 4), "k": _heads(generator, 2), "cos": wide[0], "sin": wide[1]}, {}),
        "cross_entropy": (
            {"logits": wide.view(18, 16).to(torch.bfloat16), "target": torch.arange(18) % 16},
            {"upcast": True, "ignore_index": 3},
        ),
    }[op]
    expected = _with_gradients(op, operands, attributes, "")
    if op == "rope":  # one of them is compiled, too
        found = _with_gradients(op, operands, attributes, f"compiled.{op}")
    else:
        found = _by_formulas(op, operands, {**OPERATIONS[op].defaults, **attributes})
    assert len(found) == len(expected)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, atol=2e-2, rtol=2e-2)


def test_the_gradient_of_rope_keeps_neither_its_inputs_nor_its_outputs():
    q, k = (torch.randn(1, heads, 64, 16, requires_grad=True) for heads in (4, 2))
    cos, sin = torch.randn(2, 1, 1, 64, 16)
    kept = []
    operands = {"q": q, "k": k, "cos": cos, "sin": sin}

    def keep(x):
        kept.append(x.untyped_storage().nbytes())
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        of_q, _ = perform("rope", operands, {}, "compiled.rope")
    assert max(kept) <= cos.untyped_storage().nbytes()  # which is that of both
    gradients = []
    for made in (of_q, perform("rope", operands, {})[0]):
        (first,) = torch.autograd.grad(made.square().sum(), q, create_graph=True)
        gradients.append((first, *torch.autograd.grad(first.square().sum(), q)))
    for x, y in zip(*gradients, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("by_position", [False, True])
def test_what_is_rotated_lies_as_its_operands_do_so_that_no_layer_copies_it(by_position, watched):
    q, k = (torch.randn(2, 9, heads, 16).transpose(1, 2) for heads in (4, 2))
    leaves = [(x if by_position else x.contiguous()).requires_grad_() for x in (q, k)]
    operands = dict(zip(("q", "k", "cos", "sin"), [*leaves, *torch.randn(2, 1, 1, 9, 16)], strict=True))
    found = []
    with torch.profiler.profile() if watched else contextlib.nullcontext():
        for kernel in ("compiled.rope", ""):
            outputs = perform("rope", operands, {}, kernel)
            grads = torch.autograd.grad(outputs, leaves, [torch.ones_like(x) for x in outputs])
            found.append((*outputs, *grads))
    assert [x.stride() for x in found[0]] == [x.stride() for x in (*leaves, *leaves)]
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y)


def test_one_output_of_rope_in_another_type_has_a_gradient():
    leaves = [torch.randn(1, heads, 16, 64).bfloat16().requires_grad_() for heads in (4, 2)]
    operands = dict(zip(("q", "k", "cos", "sin"), [*leaves, *torch.randn(2, 1, 1, 16, 64)], strict=True))
    for used in ((0, 1), (0,), (1,), (0, 1)):
        found = []
        for kernel in ("compiled.rope", ""):
            total = sum(perform("rope", operands, {}, kernel)[number].square().sum() for number in used)
            found.append(torch.autograd.grad(total, leaves, materialize_grads=True))
        for x, y in zip(*found, strict=True):
            torch.testing.assert_close(x, y, atol=0.125, rtol=2e-2)


def test_who_looks_on_sees_the_operators_and_the_same_numbers():
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    gate, up, grad = (torch.randn(5, 8).requires_grad_(number < 2) for number in range(3))
    seen: list[str] = []

    def both():
        out = perform("swiglu", {"gate": gate, "up": up}, {})
        return out, *torch.autograd.grad(out, (gate, up), grad)

    with xt.kernel_policy(swiglu="compiled.swiglu"):
        unseen = [both() for _ in range(2)]
        with Seen():
            watched = both()
        with xt.explain() as report:
            explained = both()
    for results in (unseen[1], watched, explained):
        for x, y in zip(results, unseen[0], strict=True):
            assert torch.equal(x, y)
    assert {"xpuruntime.swiglu.served", "xpuruntime.swiglu_backward.served"} <= set(seen)
    assert {(row.phase, row.resolved) for row in report.rows if row.op == "swiglu"} == {
        ("train", "compiled.swiglu"), ("backward", "compiled.swiglu"),
    }  # fmt: skip


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("classes", [40, 37])  # those in whole vectors, and others
def test_a_loss_in_parts_is_that_of_all_rows(biased, reduction, classes, monkeypatch):
    monkeypatch.setattr("xpuruntime.pytorch.providers.chunked._PART_BYTES", 1)
    generator = torch.Generator().manual_seed(0)
    operands = {
        "x": torch.randn(21, 16, generator=generator),
        "weight": torch.randn(classes, 16, generator=generator),
        "target": torch.arange(21) % classes,
        **({"bias": torch.randn(classes, generator=generator)} if biased else {}),
    }
    operands["target"][2] = -100
    word = "compiled.linear_cross_entropy"
    attributes = {"reduction": reduction}
    expected = _with_gradients("linear_cross_entropy", operands, attributes, "")
    found = _with_gradients("linear_cross_entropy", operands, attributes, word)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y.detach(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(perform("linear_cross_entropy", operands, attributes, word), expected[0].detach())


def _rotation(batch, length):
    q, k = (torch.randn(batch, length, heads, 8).transpose(1, 2).requires_grad_() for heads in (4, 2))
    return {"q": q, "k": k, "cos": torch.randn(1, 1, length, 8), "sin": torch.randn(1, 1, length, 8)}


def test_one_code_serves_the_comparison_autocast_and_any_batch(monkeypatch):
    from torch._dynamo.utils import counters

    monkeypatch.setattr("xpuruntime.pytorch.providers.compiled._code", {})
    monkeypatch.setattr("xpuruntime.pytorch.providers.compiled._layouts", {})
    before = counters["stats"]["unique_graphs"]
    with xt.kernel_policy(xrt.Policy(mode="strict", kernels={"rope": "compiled.rope"})):
        for batch, autocast in ((2, False), (2, True), (5, True), (7, False)):
            operands = _rotation(batch, 31)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                outputs = perform("rope", operands, {})
            torch.testing.assert_close(outputs, perform("rope", operands, {}, "compiled.rope"))
            torch.autograd.grad(outputs, [operands["q"], operands["k"]], outputs)
    assert counters["stats"]["unique_graphs"] == before + 2  # forward and backward
    assert not hasattr(operands["cos"], "_dynamo_weak_dynamic_indices")


def test_code_is_made_for_the_threads_and_switches_that_hold(monkeypatch):
    from xpuruntime.pytorch.providers import compiled

    made = []
    monkeypatch.setattr(compiled, "_code", {})
    monkeypatch.setattr(compiled, "_layouts", {})
    monkeypatch.setattr(compiled, "_of_layout", lambda function, *_: made.append(function) or function)
    x, threads = torch.randn(3, 8), torch.get_num_threads()
    try:
        for change in (lambda: None, lambda: torch.set_num_threads(threads + 1),
                       lambda: torch.use_deterministic_algorithms(True)):  # fmt: skip
            change()
            for _ in range(2):
                perform("swiglu", {"gate": x, "up": x}, {}, "compiled.swiglu")
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
    assert made.count(compiled._forward_of_swiglu) == 3


def test_a_tensor_without_dimensions_is_no_row():
    x = torch.tensor(2.0)
    with pytest.raises(UnsupportedOperationError, match="tensor without dimensions has none"):
        perform("swiglu", {"gate": x, "up": x}, {}, "compiled.swiglu")
    with xt.kernel_policy(swiglu=("compiled.swiglu", "torch")):
        torch.testing.assert_close(perform("swiglu", {"gate": x, "up": x}, {}), torch.nn.functional.silu(x) * x)


def test_tensors_without_values_get_shapes():
    with torch.device("meta"):
        gate = torch.randn(5, 8, requires_grad=True)
        out = perform("swiglu", {"gate": gate, "up": torch.randn(5, 8)}, {}, "compiled.swiglu")
        out.sum().backward()
    assert (out.shape, out.device.type, gate.grad.device.type) == ((5, 8), "meta", "meta")


def test_what_a_kernel_is_told_of_a_call_cannot_be_changed():
    x = torch.randn(3, 8)
    call = call_of("swiglu", "infer", {"gate": x, "up": x}, {"approximate": "none"})
    for facts in (call.attributes, call.operands):
        with pytest.raises(TypeError):
            facts["gate"] = None
    assert call is call_of("swiglu", "infer", {"gate": x, "up": x}, {"approximate": "none"})


def test_code_for_no_rows_serves_no_others(monkeypatch):
    monkeypatch.setattr("xpuruntime.pytorch.providers.compiled._code", {})
    monkeypatch.setattr("xpuruntime.pytorch.providers.compiled._layouts", {})
    for shape in ((0, 6), (5, 6), (3, 0)):
        operands = {"gate": torch.randn(shape), "up": torch.randn(shape)}
        found = perform("swiglu", operands, {}, "compiled.swiglu")
        torch.testing.assert_close(found, perform("swiglu", operands, {}))


def test_a_loss_of_no_rows_has_gradients_of_zeros():
    operands = {"x": torch.randn(0, 16), "weight": torch.randn(40, 16), "target": torch.arange(0)}
    word, attributes = "compiled.linear_cross_entropy", {"reduction": "sum"}
    loss, of_x, of_weight = _with_gradients("linear_cross_entropy", operands, attributes, word)
    assert (loss.item(), of_x.shape) == (0.0, (0, 16))
    torch.testing.assert_close(of_weight, torch.zeros(40, 16))


def test_a_gradient_by_a_transform_of_functions():
    gate, up = torch.randn(2, 5, 16)

    def summed(kernel):
        return lambda gate: perform("swiglu", {"gate": gate, "up": up}, {}, kernel).sum()

    for transform in (torch.func.grad, lambda function: torch.func.grad(lambda x: torch.func.grad(function)(x).sum())):
        torch.testing.assert_close(transform(summed("compiled.swiglu"))(gate), transform(summed(""))(gate))


def test_transforms_without_a_rule_are_left_to_pytorch():
    gate, up = torch.randn(2, 5, 16)

    def unit(gate, up, kernel=""):
        return perform("swiglu", {"gate": gate, "up": up}, {}, kernel)

    expected = unit(gate, up)
    with xt.kernel_policy(xrt.Policy(kernels={"swiglu": "compiled.swiglu"})):
        torch.testing.assert_close(unit(gate, up), expected)
        with pytest.warns(xrt.XpuRuntimeWarning, match="no rule for vmap"):
            torch.testing.assert_close(torch.vmap(unit)(gate, up), expected)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of PyTorch's rules of forward derivatives
            tangent = torch.func.jvp(lambda gate: unit(gate, up), (gate,), (gate,))[1]
    torch.testing.assert_close(tangent, torch.func.jvp(lambda gate: unit(gate, up), (gate,), (gate,))[1])
    with pytest.raises(UnsupportedOperationError, match="no rule for vmap"):
        torch.vmap(lambda gate, up: unit(gate, up, "compiled.swiglu"))(gate, up)


def test_layouts_beyond_the_first_few_share_one_code(monkeypatch):
    from torch._dynamo.utils import counters

    from xpuruntime.pytorch.providers import compiled

    monkeypatch.setattr(compiled, "_code", {})
    monkeypatch.setattr(compiled, "_layouts", {})
    monkeypatch.setattr(compiled, "_MOST_LAYOUTS", 2)
    before = counters["stats"]["unique_graphs"]
    kernel = next(kernel for kernel in KERNELS if kernel.op == "rope")
    for length in range(40, 46):
        operands = _rotation(2, length)
        (found, _), _ = kernel.forward(call_of("rope", "infer", operands, {}), *operands.values())
        torch.testing.assert_close(found, perform("rope", operands, {})[0].detach())
    assert counters["stats"]["unique_graphs"] == before + 3


def test_auto_leaves_it_out_on_the_cpu():
    from xpuruntime.ops.torch_kernels import automatic_torch_kernels

    chosen = {device: [kernel.id for kernel in automatic_torch_kernels("rope", device)] for device in ("cpu", "cuda")}
    assert chosen == {"cpu": [], "cuda": ["compiled.rope"]}


def test_a_batch_of_one_row_passes_the_comparison():
    logits, target = torch.randn(1, 33, requires_grad=True), torch.tensor([3])
    with xt.kernel_policy(xrt.Policy(mode="strict", kernels={"cross_entropy": "compiled.cross_entropy"})):
        loss = torch.nn.functional.cross_entropy(logits, target)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, target))


def _answer():
    gate = torch.ones(2, 8)
    kernel = next(kernel for kernel in KERNELS if kernel.op == "swiglu")
    return kernel.supports(call_of("swiglu", "infer", {"gate": gate, "up": gate}, {}))


@pytest.mark.parametrize("variable", ["TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"])
def test_a_variable_that_disables_dynamo_is_named(variable, monkeypatch):
    assert _answer() == (True, "")
    monkeypatch.setenv(variable, "1")
    assert _answer() == (False, f"{variable}=1 keeps torch.compile from compiling it. Fix: unset {variable}")
    assert all(environment_values(kernel)[variable] == "1" for kernel in KERNELS)


def test_dynamo_that_is_disabled_in_the_program_compiles_nothing():
    with torch._dynamo.config.patch(disable=True):
        fits, why = _answer()
    assert not fits
    assert why.endswith("Fix: torch._dynamo.config.disable = False")


def test_a_stance_is_looked_at_in_each_call(monkeypatch):
    monkeypatch.setenv("XPURUNTIME_CANARY", "off")
    gate, up = torch.randn(2, 4, 8)

    def resolved():
        with xt.explain() as report:
            perform("swiglu", {"gate": gate, "up": up}, {})
        return {(row.resolved == "compiled.swiglu", "set_stance(" in row.reason) for row in report.rows if row.op}

    with xt.kernel_policy(xrt.Policy(mode="prefer", kernels={"swiglu": ["compiled.swiglu", "torch"]})):
        for options in ({"stance": "force_eager"}, {"stance": "default", "force_backend": "eager"}):
            with torch.compiler.set_stance(**options):
                assert resolved() == {(False, True)}
            assert resolved() == {(True, False)}
    with torch.compiler.set_stance("force_eager"), pytest.raises(UnsupportedOperationError, match="set_stance"):
        perform("swiglu", {"gate": gate, "up": up}, {}, "compiled.swiglu")


@pytest.mark.parametrize("name", ["", "no-such-compiler"])
def test_the_compiler_is_that_of_inductor(name, monkeypatch, tmp_path):
    for other in ("c++", "clang++"):
        (tmp_path / other).write_text("#!/bin/sh\n")
        (tmp_path / other).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("xpuruntime.pytorch.providers.compiled._COMPILER", "g++")
    monkeypatch.delenv("CXX", raising=False)
    if name:
        monkeypatch.setenv("CXX", name)
    fits, why = _answer()
    assert not fits
    assert why.startswith(f"it is compiled by the C++ compiler '{name or 'g++'}'")
    assert why.endswith("Fix: install g++, or set CXX to the path of a C++ compiler")
    monkeypatch.setenv("CXX", "clang++")
    assert _answer() == (True, "")
