# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Operations of models under a policy, as SwiGLU and products of groups: served by kernels of other packages."""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import os
import pickle
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

import xpuruntime as xrt
from xpuruntime.errors import UnsupportedOperationError, XpuRuntimeWarning

torch = pytest.importorskip("torch")
xt = pytest.importorskip("xpuruntime.pytorch")

from package_kernels import REFERENCES, WideKernel, package, rows_of, strict  # noqa: E402, F401 - it needs both

from xpuruntime.pytorch.adapters import gated_units  # noqa: E402
from xpuruntime.pytorch.coverage import class_code  # noqa: E402
from xpuruntime.pytorch.providers import operations  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.usefixtures("nothing_is_watched_afterwards", "own_tuning_cache", "package"),
]


class Unit(torch.nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.gate_proj, self.up_proj = torch.nn.Linear(8, 16), torch.nn.Linear(8, 16)
        self.down_proj, self.act_fn = torch.nn.Linear(16, 8), activation

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Doubled(Unit):
    def forward(self, x):
        return self.down_proj(2 * self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def step(model, x):
    model.zero_grad()
    out = model(x)
    out.pow(2).sum().backward()
    return [out.detach(), *[parameter.grad.clone() for parameter in model.parameters()]]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("activation", "op"),
    [(torch.nn.SiLU(), "swiglu"), (torch.nn.GELU(), "geglu"), (torch.nn.GELU(approximate="tanh"), "geglu")],
)
def test_gated_units(activation, op, compiled):
    model, x = torch.nn.Sequential(Unit(activation)), torch.randn(4, 8)
    own, plain = Unit.__dict__["forward"], step(model, x)
    run = model
    if compiled:
        torch._dynamo.reset()
        run = torch.compile(model, backend="aot_eager", fullgraph=True)
    with xt.kernel_policy(strict(op)), xt.explain(root=model) as report:
        torch.testing.assert_close(step(run, x), plain)
    report.require()
    assert {(row.resolved, row.status) for row in rows_of(report, op)} == {(f"package.{op}", "honoured")}
    assert {row.phase for row in rows_of(report, op)} >= {"backward"}
    with xt.kernel_policy(xrt.KernelPolicy(**{op: ["torch"]})):
        assert all(map(torch.equal, step(model, x), plain))
    with xt.kernel_policy(strict("swiglu" if op == "geglu" else "geglu")):
        assert all(map(torch.equal, step(model, x), plain))
    with xt.kernel_policy(strict(op)):
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    assert Unit.__dict__["forward"] is own
    assert all(torch.equal(one(x), plain[0]) for one in (model, *copies))


@pytest.mark.parametrize("word", ["package.swiglu", f"triton:{operations.__name__}.swiglu"])
def test_a_gradient_that_a_kernel_computes_by_autograd(word):
    unit, x = Unit(torch.nn.SiLU()), torch.randn(4, 8)
    plain = step(unit, x)
    with xt.kernel_policy(xrt.Policy(mode="strict", kernels={"swiglu": word})):
        torch.testing.assert_close(step(unit, x), plain)  # twice: what is known of the calls serves the second one
        torch.testing.assert_close(step(unit, x), plain)


def test_units_that_compute_something_else():
    x = torch.randn(4, 8)
    with xt.kernel_policy(strict("swiglu")):
        Unit(torch.nn.ReLU())(x)  # which is none
        with pytest.raises(UnsupportedOperationError, match="no product of SiLU or GELU"):
            Doubled(torch.nn.SiLU())(x)
    with pytest.warns(XpuRuntimeWarning, match="no product of SiLU"), xt.kernel_policy(swiglu="package.swiglu"):
        Doubled(torch.nn.SiLU())(x)


class Scaled(Unit):
    scale = 1.0

    def forward(self, x):
        return super().forward(x) * self.scale


class Optional(Unit):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * getattr(self, "scale", 1.0))


class Limited(Unit):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=1e3)) * self.up_proj(x))


class Swish(torch.nn.Module):
    def __init__(self, beta=1.0):
        super().__init__()
        self.beta = beta

    def forward(self, x):
        return torch.nn.functional.silu(x * self.beta)


def hooked():
    unit = Unit(torch.nn.SiLU())
    unit.act_fn.register_forward_hook(lambda _module, _args, out: 2 * out)
    return unit


def replaced():
    unit = Unit(torch.nn.SiLU())
    unit.act_fn.forward = torch.nn.functional.relu
    return unit


FACTOR = SimpleNamespace(now=1.0)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        *((lambda kind=kind: kind(torch.nn.SiLU()), "no product of SiLU") for kind in (Optional, Limited)),
        (lambda: Unit(Swish(3.0)), "no product of SiLU"),
        (lambda: Unit(lambda x: torch.nn.functional.silu(x) * FACTOR.now), "no product of SiLU"),
        (hooked, "its activation has hooks"),
        (replaced, "or a forward of its own"),
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_units_whose_instance_or_numbers_decide_what_they_compute(make, said, compiled):
    unit, x = make(), torch.randn(4, 8)
    unit.scale = 3.0
    plain = unit(x), unit(1e4 * x)
    run = unit
    if compiled:
        torch._dynamo.reset()
        run = torch.compile(unit, backend="aot_eager")
    with xt.kernel_policy(swiglu="package.swiglu"):
        with pytest.warns(XpuRuntimeWarning, match=said):
            torch.testing.assert_close(run(x), plain[0])
        torch.testing.assert_close(run(1e4 * x), plain[1])


def test_hooks_of_all_modules_run_around_the_activation_too():
    unit, x, seen = Unit(torch.nn.SiLU()), torch.randn(4, 8), []
    hook = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module)))
    with hook, xt.kernel_policy(swiglu="package.swiglu"), pytest.warns(XpuRuntimeWarning, match="has hooks"):
        unit(x)
    assert torch.nn.SiLU in seen
    with xt.kernel_policy(strict("swiglu")):
        unit(x)


def test_a_class_of_activations_that_is_changed_is_recognized_anew(monkeypatch):
    unit, x = Unit(torch.nn.SiLU()), torch.randn(4, 8)
    with xt.kernel_policy(strict("swiglu")):
        unit(x)
        monkeypatch.setattr(torch.nn.SiLU, "forward", lambda self, x: torch.relu(x))
        torch.testing.assert_close(unit(x), Unit.forward.__wrapped__(unit, x))


def test_gelu_of_other_bits_is_refused_and_another_function_left():
    activations = pytest.importorskip("transformers.activations").ACT2FN
    x = torch.randn(4, 8)
    with xt.kernel_policy(strict("geglu")), xt.explain() as report:
        for name in ("gelu_new", "gelu_python", "gelu_fast"):
            with pytest.raises(UnsupportedOperationError, match="no product of SiLU or GELU"):
                Unit(activations[name])(x)
        Unit(activations["gelu"])(x)
        changed = Unit(activations["gelu"])
        changed.act_fn.act = torch.relu
        torch.testing.assert_close(changed(x), Unit.forward.__wrapped__(changed, x))
    assert [row.status for row in rows_of(report, "geglu")] == ["honoured"]


def test_a_class_that_scales_the_unit_of_another_is_served_inside():
    unit, x = Scaled(torch.nn.SiLU()), torch.randn(4, 8)
    unit.scale = 3.0
    plain = unit(x)
    with xt.kernel_policy(strict("swiglu")), xt.explain() as report:
        torch.testing.assert_close(unit(x), plain)
    assert [row.status for row in rows_of(report, "swiglu")] == ["honoured"]


def test_policies_of_two_threads_decide_one_gated_unit_each():
    unit, x = Unit(torch.nn.GELU()), torch.randn(4, 8)
    entered, leave = threading.Event(), threading.Event()

    def hold():
        with xt.kernel_policy(strict("swiglu")):
            entered.set()
            leave.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait()
    with xt.kernel_policy(strict("geglu")), xt.explain() as report:
        leave.set()
        thread.join()
        unit(x)
    assert [row.status for row in rows_of(report, "geglu")] == ["honoured"]
    assert not hasattr(Unit.forward, "__wrapped__")


def test_cross_entropy_of_rows():
    logits, target = torch.randn(6, 9, requires_grad=True), torch.tensor([0, 8, -100, 3, 3, 1])
    plain = torch.nn.functional.cross_entropy(logits, target)
    (gradient,) = torch.autograd.grad(plain, logits)
    with xt.kernel_policy(strict("cross_entropy")), xt.explain() as report:
        loss = torch.nn.CrossEntropyLoss()(logits, target)
        torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], gradient)
    torch.testing.assert_close(loss, plain)
    report.require()
    assert {row.status for row in rows_of(report, "cross_entropy")} == {"honoured"}
    with xt.kernel_policy(strict("cross_entropy")):
        assert torch.nn.functional.mse_loss(logits, logits) == 0
        with pytest.raises(UnsupportedOperationError, match="without class weights and label smoothing"):
            torch.nn.functional.cross_entropy(logits, target, label_smoothing=0.1)
    with xt.kernel_policy(cross_entropy=["package.other", "torch"]):
        assert torch.equal(torch.nn.functional.cross_entropy(logits, target), plain)


@pytest.mark.parametrize("family", ["Llama", "Gemma", "Qwen3", "Phi3", "GraniteMoeShared"])
def test_models_of_transformers(monkeypatch, family):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    hf = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64, "pad_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(0)
    model = getattr(hf, f"{family}ForCausalLM")(getattr(hf, f"{family}Config")(**sizes))
    ids = torch.randint(1, 64, (2, 6))

    def train():
        model.zero_grad()
        out = model(ids, labels=ids)
        out.loss.backward()
        return [out.loss.detach(), out.logits.detach(), *[parameter.grad.clone() for parameter in model.parameters()]]

    plain = train()
    module = sys.modules[type(model).__module__]
    own = module.apply_rotary_pos_emb
    unit = {"Gemma": ("geglu",)}.get(family, ("swiglu",))
    ops = (*unit, "rope", "cross_entropy")
    with xt.kernel_policy(strict(*ops)), xt.explain(root=model) as report:
        under = train()
    torch.testing.assert_close(under, plain, rtol=1e-4, atol=1e-5)
    report.require()
    for op in ops:
        assert {row.status for row in rows_of(report, op)} == {"honoured"}, op
        assert sum(row.count for row in rows_of(report, op) if row.phase == "train") == (
            1 if op == "cross_entropy" else 2
        )
    assert module.apply_rotary_pos_emb is own
    with xt.kernel_policy(xrt.KernelPolicy(**{op: ["package.none", "torch"] for op in ops})):
        assert all(map(torch.equal, train(), plain))


@pytest.mark.parametrize("takes_halves", [True, False])
def test_losses_of_transformers_give_a_kernel_the_logits_without_a_copy(monkeypatch, takes_halves):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    losses = pytest.importorskip("transformers.loss.loss_utils")
    own = dict(losses.LOSS_MAPPING)
    logits = torch.randn(2, 5, 16).to(torch.bfloat16).requires_grad_()
    labels = torch.randint(16, (2, 5))
    seen = []

    def supports(kernel, call):
        del kernel
        seen.append(call.operands["logits"].dtype)
        return takes_halves or seen[-1] != "bfloat16", "it computes float32"

    monkeypatch.setattr(WideKernel, "supports", supports)

    def step():
        loss = losses.LOSS_MAPPING["ForCausalLM"](logits=logits, labels=labels, vocab_size=16)
        return loss.detach(), *torch.autograd.grad(loss, logits)

    plain = step()
    with xt.kernel_policy(strict("cross_entropy")), xt.explain() as report:
        under = step()
    torch.testing.assert_close(under, plain)
    assert [x.dtype for x in under] == [torch.float32, torch.bfloat16]
    report.require()
    assert ("float32" in seen) is not takes_halves
    assert {row.status for row in rows_of(report, "cross_entropy")} == {"honoured"}
    assert own == losses.LOSS_MAPPING


@pytest.mark.parametrize("compiled", [False, True])
def test_gated_units_inside_of_more_are_refused(monkeypatch, compiled):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    module = pytest.importorskip("transformers.models.modernbert.modeling_modernbert")
    unit, x = module.ModernBertMLP(module.ModernBertConfig(hidden_size=8, intermediate_size=16)), torch.randn(2, 3, 8)
    unit.eval()
    torch._dynamo.reset()
    run, plain = torch.compile(unit, backend="aot_eager") if compiled else unit, unit(x)
    with xt.kernel_policy(strict("geglu")), pytest.raises(Exception, match="its gated unit is inside of more"):
        run(x)
    with xt.kernel_policy(geglu="package.geglu"), pytest.warns(XpuRuntimeWarning, match="inside of more"):
        assert torch.equal(run(x), plain)
    with xt.kernel_policy(strict("swiglu")):
        assert torch.equal(run(x), plain)


#: A part of the files of transformers: XPURUNTIME_ALL_PATTERNS=1 looks at all of them.
EVERY = 1 if os.environ.get("XPURUNTIME_ALL_PATTERNS") else 4


def test_the_gated_units_of_transformers_are_served_or_refused(monkeypatch):
    """Each product by an activation, in classes of models: those left are gates of norms and of other functions."""
    monkeypatch.setitem(sys.modules, "torchvision", None)
    folder = Path(pytest.importorskip("transformers").models.__file__).parent
    left = set()
    for path in sorted(folder.glob("*/modeling_*.py"))[::EVERY]:
        text = path.read_text()
        if not re.search(
            r"(act\w*|silu|gelu)\([^\n]*\) \* |\* (self\.|F\.|nn\.functional\.)\w*(act|silu|gelu)\w*\(", text
        ):
            continue
        with contextlib.suppress(ImportError):
            module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
            kinds = [
                kind for kind in vars(module).values() if inspect.isclass(kind) and kind.__module__ == module.__name__
            ]
            for kind in kinds:
                forward = vars(kind).get("forward")
                if not issubclass(kind, torch.nn.Module) or not class_code.multiplies_activation(
                    inspect.unwrap(forward or len)
                ):
                    continue
                if not any(own(kind) for own in (gated_units._own_forward, gated_units._other_forward)):
                    left.add(kind.__name__)
    assert left, "the pattern matches nothing"
    assert {name for name in left if "RMSNorm" not in name} == set()


@pytest.mark.parametrize("experts", ["batched_mm", "grouped_mm"])
def test_experts_of_transformers(monkeypatch, experts):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    hf = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64, "pad_token_id": 0, "num_local_experts": 4,
    }  # fmt: skip
    torch.manual_seed(0)
    model = hf.MixtralForCausalLM(hf.MixtralConfig(**sizes))
    kind = type(model.model.layers[0].mlp.experts)
    if not hasattr(kind, "_apply_gate"):
        pytest.skip("this transformers has no method for the gate of experts")
    model.set_experts_implementation(experts)
    own, ids = kind.__dict__["_apply_gate"], torch.randint(1, 64, (2, 6))
    plain = model(ids).logits
    ops = ("swiglu", "grouped_matmul") if experts == "grouped_mm" else ("swiglu",)
    with xt.kernel_policy(strict(*ops)), xt.explain(root=model) as report:
        torch.testing.assert_close(model(ids).logits, plain)
    products = {(row.resolved, row.status) for row in rows_of(report, "grouped_matmul")}
    assert products == ({("package.grouped_matmul", "honoured")} if experts == "grouped_mm" else set())
    assert {(row.resolved, row.status, row.count) for row in rows_of(report, "swiglu")} == {
        ("package.swiglu", "honoured", 1)
    }
    model.set_experts_implementation("eager")
    with xt.kernel_policy(strict("swiglu")), pytest.raises(UnsupportedOperationError, match="inside of more"):
        model(ids)
    model.set_experts_implementation(experts)
    assert kind.__dict__["_apply_gate"] is own
    assert torch.equal(model(ids).logits, plain)


def groups(dtype=torch.float32):
    torch.manual_seed(0)
    x, weight = torch.randn(9, 16, dtype=dtype), torch.randn(4, 8, 16, dtype=dtype).mT
    return x.requires_grad_(), weight.requires_grad_(), torch.tensor([2, 2, 7, 9], dtype=torch.int32)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["torch.nn.functional.grouped_mm", "torch._grouped_mm"])
def test_products_of_groups(name, compiled):
    x, weight, offsets = groups(torch.bfloat16)
    own, up = torch._grouped_mm, torch.randn(9, 8, dtype=torch.bfloat16)

    def product(x, weight):
        function = torch.nn.functional.grouped_mm if "functional" in name else torch._grouped_mm
        return function(x, weight, offs=offsets)

    def step(run):
        out = run(x, weight)
        return out.detach(), *torch.autograd.grad(out, (x, weight), up)

    plain = step(product)
    run = product
    if compiled:
        torch._dynamo.reset()
        run = torch.compile(product, backend="aot_eager", fullgraph=True)
    with xt.kernel_policy(strict("grouped_matmul")), xt.explain() as report:
        under = step(run)
    torch.testing.assert_close(under, plain)
    report.require()
    rows = {(row.resolved, row.status, row.phase) for row in rows_of(report, "grouped_matmul")}
    assert rows == {("package.grouped_matmul", "honoured", phase) for phase in ("train", "backward")}
    assert torch._grouped_mm is own
    with xt.kernel_policy(grouped_matmul=["package.other", "torch"]):
        assert all(map(torch.equal, step(product), plain))


def test_products_of_groups_in_other_forms():
    x, weight, offsets = groups()
    with xt.kernel_policy(strict("grouped_matmul")), pytest.raises(UnsupportedOperationError, match="end at offsets"):
        torch.nn.functional.grouped_mm(torch.randn(4, 3, 16), weight)
    with xt.kernel_policy(grouped_matmul="package.grouped_matmul"), pytest.warns(XpuRuntimeWarning, match="offsets"):
        torch.nn.functional.grouped_mm(torch.randn(4, 3, 16), weight)
    with xt.kernel_policy(strict("grouped_matmul")), torch.inference_mode(), xt.explain() as report:
        torch.nn.functional.grouped_mm(x, weight, offs=offsets)
    assert {(row.status, row.phase) for row in rows_of(report, "grouped_matmul")} == {("honoured", "infer")}


def test_canary_finds_a_product_that_leaves_out_short_groups(monkeypatch):
    compute = WideKernel._compute

    def without_single_rows(self, call, tensors):
        (out,) = compute(self, call, tensors)
        ends = tensors[2].tolist() if self.op == "grouped_matmul" else []
        for start, end in zip([0, *ends], ends, strict=False):
            if end - start == 1:
                out = out.index_fill(0, torch.tensor([start]), 0)
        return (out,)

    monkeypatch.setattr(WideKernel, "_compute", without_single_rows)
    x, weight, offsets = groups()
    with (
        xt.kernel_policy(strict("grouped_matmul")),
        pytest.raises(UnsupportedOperationError, match="the output differs"),
    ):
        torch.nn.functional.grouped_mm(x, weight, offs=offsets)


class Fused(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj, self.down_proj = torch.nn.Linear(8, 32), torch.nn.Linear(16, 8)
        self.act_fn = torch.nn.SiLU()

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(up * self.act_fn(gate))


class Swapped(Fused):
    def forward(self, x):
        up, gate = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(up * self.act_fn(gate))


def test_gates_beside_their_inputs():
    x = torch.randn(4, 8)
    with xt.kernel_policy(strict("swiglu")), xt.explain() as report:
        step(Fused(), x)
    assert {row.status for row in rows_of(report, "swiglu")} == {"honoured"}
    with xt.kernel_policy(strict("swiglu")), pytest.raises(UnsupportedOperationError, match="no product of SiLU"):
        Swapped()(x)


def test_engines_say_that_a_model_has_none(tmp_path):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    info = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [2])
    other = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [2])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "graph", [info], [other])
    path = tmp_path / "model.onnx"
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8), path)
    plan = xrt.plan(path, xrt.Policy(kernels={"swiglu": "package.swiglu"}, execution={"engine": "onnxruntime"}))
    assert "no swiglu was found in the model" in str(plan.to_dict())


def test_the_core_is_given_its_own_operations_alone():
    kernels = {
        "matmul": "cpu.reference", "rope": "package.rope",
        "rules": [{"match": {"op": "swiglu"}, "use": "package.swiglu"}],
    }  # fmt: skip
    with xt.kernel_policy(xrt.Policy(mode="strict", kernels=kernels)), xt.explain() as report:
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert {row.status for row in rows_of(report, "matmul")} >= {"honoured"}
    nobody = xrt.Policy(mode="strict", kernels={"swiglu": "nobody.swiglu"})
    with pytest.raises(UnsupportedOperationError, match="there is no such kernel"), xt.kernel_policy(nobody):
        pass
