# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Norms of model classes under a policy: recognized by their bits, led to its kernels, and left as they were."""

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
from collections import Counter
from pathlib import Path

import pytest

import xpuruntime as xrt
from xpuruntime.errors import UnsupportedOperationError, XpuRuntimeWarning

torch = pytest.importorskip("torch")
xt = pytest.importorskip("xpuruntime.pytorch")

from torch_kernels import ForeignNorm  # noqa: E402 - it needs both

from xpuruntime.ops import plugins  # noqa: E402
from xpuruntime.ops.torch_kernels import Saved, TorchCall, forget_torch_kernels  # noqa: E402
from xpuruntime.pytorch.dispatch.step_cost import peak_bytes  # noqa: E402
from xpuruntime.pytorch.providers.operations import rms_norm  # noqa: E402
from xpuruntime.pytorch.providers.operators import perform  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("nothing_is_watched_afterwards", "own_tuning_cache")]

SILU = torch.nn.functional.silu


class Norm(torch.nn.Module):
    def __init__(self, columns=16, eps=1e-6):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(columns) + 1)
        self.variance_epsilon = eps

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


class Llama(Norm):
    def forward(self, hidden_states):
        return self.weight * self._norm(hidden_states.float()).to(hidden_states.dtype)


class Inside(Norm):
    def forward(self, x):
        return (self.weight * self._norm(x.float())).to(x.dtype)


class Gemma(Norm):
    def forward(self, x):
        return (self._norm(x.float()) * (1.0 + self.weight.float())).type_as(x)


class T5(Norm):
    def forward(self, hidden_states):
        normal = self._norm(hidden_states.float())
        if self.weight.dtype in [torch.float16, torch.bfloat16]:
            normal = normal.to(self.weight.dtype)
        return self.weight * normal


class Unweighted(Norm):
    def forward(self, x):
        return self._norm(x.float()).to(x.dtype)


class GatedBefore(Norm):
    def forward(self, x, gate=None):
        rows = x.float()
        if gate is not None:
            rows = rows * SILU(gate.float())
        return self.weight * self._norm(rows).to(x.dtype)


class GatedAfter(Norm):
    def forward(self, hidden_states, gate):
        normal = self.weight * self._norm(hidden_states.float()).to(hidden_states.dtype)
        return (normal * SILU(gate.float())).to(hidden_states.dtype)


class Grouped(Norm):
    def __init__(self, columns=16):
        super().__init__(columns)
        self.group_size = 4

    def forward(self, x):
        groups = x.float().view(*x.shape[:-1], -1, self.group_size)
        return self.weight * self._norm(groups).view(x.shape).to(x.dtype)


class Constant(Norm):
    def forward(self, x):
        return self.weight * (x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5))


class Centered(Norm):
    def forward(self, x):
        rows = x.float()
        rows = rows - rows.mean(-1, keepdim=True)
        return (self.weight.float() * self._norm(rows)).to(x.dtype)


class Unknown(Norm):
    def forward(self, x):
        return x * self.weight / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon + x.mean() ** 2)


KNOWN = (Llama, Inside, Gemma, T5, Unweighted, GatedBefore, GatedAfter, Grouped, Constant, Centered)


def strict(**kernels):
    return xrt.Policy(mode="strict", kernels=kernels)


NORMS = strict(rms_norm="cpu.reference")


def operands(norm, dtype):
    x = torch.randn(3, 5, 16).to(dtype).requires_grad_()
    gated = norm.forward.__code__.co_argcount == 3
    return (x, torch.randn(3, 5, 16).to(dtype)) if gated else (x,)


def gradients(norm, args):
    norm.zero_grad()
    args[0].grad = None
    out = norm(*args)
    out.float().pow(3).sum().backward()
    weight = norm.weight.grad
    return [one.detach().float() for one in (out, args[0].grad, *([] if weight is None else [weight]))], out.dtype


TYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)]


@pytest.mark.parametrize(("dtype", "weight"), TYPES)
@pytest.mark.parametrize("kind", KNOWN)
def test_a_known_formula_runs_by_the_kernel_and_gives_what_the_class_gives(kind, dtype, weight):
    if kind is Constant and dtype is not torch.float32:
        pytest.skip("it computes in the type of its input, which is another formula in halves")
    torch.manual_seed(0)
    norm = kind().to(weight)
    args = operands(norm, dtype)
    plain, kept = gradients(norm, args)
    own = kind.__dict__["forward"]
    op = "layer_norm" if kind is Centered else "rms_norm"
    with xt.kernel_policy(strict(**{op: "cpu.reference"})), xt.explain() as report:
        assert kind.__dict__["forward"] is not own
        under, dtype_under = gradients(norm, args)
    assert kind.__dict__["forward"] is own
    assert dtype_under == kept
    bound = 2e-5 if dtype is torch.float32 else 2e-2
    for one, other in zip(under, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=bound, atol=bound * float(other.abs().max()))
    report.require()
    assert {row.status for row in report.rows if row.op == op} == {"honoured"}
    assert {row.resolved for row in report.rows if row.op == op} == {"cpu.reference"}
    assert [kind.__name__ in note and f"the kernels of {op}" in note for note in report.notes] == [True]
    again, _ = gradients(norm, args)
    assert all(map(torch.equal, again, plain))


@pytest.mark.filterwarnings("ignore::xpuruntime.errors.XpuRuntimeWarning")
@pytest.mark.parametrize(("dtype", "weight"), TYPES)
@pytest.mark.parametrize("kind", [Llama, Inside, Gemma, T5])
def test_where_no_kernel_can_serve_the_operators_own_kernel_gives_the_same_bits(kind, dtype, weight):
    norm = kind().to(weight)
    x = operands(norm, dtype)[0]
    plain = norm(x)
    with xt.kernel_policy(rms_norm="cuda_raw.rms_norm"), xt.explain() as report:
        assert torch.equal(norm(x), plain)
    assert {row.status for row in report.rows if row.op == "rms_norm"} == {"substituted"}


def test_what_an_instance_has_counts_and_not_its_class():
    norms = Llama(eps=1e-6), Llama(eps=0.5)
    x = torch.randn(2, 16)
    plain = [norm(x) for norm in norms]
    with xt.kernel_policy(NORMS):
        for norm, other in zip(norms, plain, strict=True):
            torch.testing.assert_close(norm(x), other)
        norms[0].variance_epsilon = 0.5
        changed = norms[0](x)
    assert torch.equal(changed, copy.deepcopy(norms[0])(x)) or torch.allclose(changed, norms[0](x), atol=1e-6)
    assert not torch.allclose(changed, plain[0], atol=1e-3)


def test_a_class_that_extends_the_forward_of_another():
    class Doubled(Llama):
        def forward(self, hidden_states):
            return 2 * super().forward(hidden_states=hidden_states)

    norm, x = Doubled(), torch.randn(2, 16)
    plain = norm(x)
    with xt.kernel_policy(NORMS), xt.explain() as report:
        torch.testing.assert_close(norm(x), plain)
    assert report.require().coverage.honoured > 0


def test_classes_made_under_a_policy_are_adapted_and_left_too():
    before = dict(vars(torch.nn.Module))
    with xt.kernel_policy(NORMS):

        class Late(Norm):
            def forward(self, x):
                return self.weight * self._norm(x)

        with xt.explain() as report:
            Late()(torch.randn(2, 16))
        report.require()
        adapted = Late.__dict__["forward"]
    assert adapted.__wrapped__ is Late.__dict__["forward"]
    assert dict(vars(torch.nn.Module)) == before


def test_classes_that_nobody_was_told_of_are_adapted_by_the_next_policy():
    class Silent(Norm):
        def __init_subclass__(cls, **kwargs):
            pass

    with xt.kernel_policy(NORMS):

        class Late(Silent):
            def forward(self, x):
                return self.weight * self._norm(x)

        assert not hasattr(Late.forward, "__wrapped__")
        with xt.kernel_policy(rms_norm="cpu.reference"), xt.explain() as report:
            Late()(torch.ones(2, 16))
        assert {row.resolved for row in report.rows if row.status == "honoured"} == {"cpu.reference"}
        assert hasattr(Late.forward, "__wrapped__"), "the first policy has it, too"
    assert not hasattr(Late.forward, "__wrapped__")


def test_nothing_stays_in_models_copied_inside_or_outside():
    model, x = torch.nn.Sequential(Llama(), Gemma()), torch.randn(2, 16)
    plain = model(x)
    with xt.kernel_policy(NORMS):
        copied, data = copy.deepcopy(model), pickle.dumps(model)
        inside = pickle.loads(data)
        with xt.kernel_policy(rms_norm="cpu.vectorised"):
            nested = model(x)
        torch.testing.assert_close(nested, plain)
    for one in (model, copied, inside, pickle.loads(data), copy.deepcopy(copied)):
        assert torch.equal(one(x), plain)
        assert all("forward" not in vars(part) for part in one)
    assert not hasattr(Llama.forward, "__wrapped__")


def test_another_library_that_replaces_the_forward_meanwhile_keeps_it():
    class Own(Norm):
        def forward(self, x):
            return self.weight * self._norm(x)

    def theirs(self, x):
        return x

    with xt.kernel_policy(NORMS):
        Own.forward = theirs
    assert Own.__dict__["forward"] is theirs


def test_an_unknown_formula_is_a_gap_and_refused():
    model, x = torch.nn.Sequential(torch.nn.Linear(16, 16), Unknown()), torch.randn(2, 16)
    (gap,) = xt.coverage_gaps(NORMS, module=model)
    assert (gap.op, gap.what) == ("rms_norm", "1")
    assert Unknown.__qualname__ in gap.reason
    with pytest.raises(UnsupportedOperationError, match="by none of the formulas"), xt.kernel_policy(NORMS):
        model(x)
    plain = model(x)
    with xt.kernel_policy(rms_norm="cpu.reference"), xt.explain() as report:
        with pytest.warns(XpuRuntimeWarning, match="by none of the formulas"):
            assert torch.equal(model(x), plain)
        assert torch.equal(model(x), plain)  # nothing is said twice
    (row,) = (row for row in report.rows if row.op == "rms_norm")
    assert (row.operator, row.status, row.count) == ("nn::Unknown", "substituted", 2)


class Optional(Norm):
    def forward(self, x):
        return getattr(self, "scale", 1.0) * self.weight * self._norm(x.float()).to(x.dtype)


class Limited(Norm):
    def forward(self, x):
        mean = x.float().pow(2).mean(-1, keepdim=True).clamp(max=1e4)
        return self.weight * (x.float() * torch.rsqrt(mean + self.variance_epsilon)).to(x.dtype)


SCALE = 1.0


class Around(Norm):
    def forward(self, x):
        return self.weight * self._norm(x.float()).to(x.dtype) * SCALE


class OverTheFirst(Norm):
    def forward(self, x):
        mean = x.float().pow(2).mean((0, -1), keepdim=True)
        return self.weight * (x.float() * torch.rsqrt(mean + self.variance_epsilon)).to(x.dtype)


class OverTheSecond(Norm):
    def forward(self, x):
        mean = x.float().pow(2).mean((1, -1), keepdim=True)
        return self.weight * (x.float() * torch.rsqrt(mean + self.variance_epsilon)).to(x.dtype)


@pytest.mark.parametrize("shape", [(3, 5, 16), (2, 3, 4, 16), (2, 2, 3, 2, 16)])
@pytest.mark.parametrize("kind", [Optional, Limited, Around, OverTheFirst, OverTheSecond])
def test_a_norm_that_small_rows_of_a_plain_instance_do_not_show_is_refused(kind, shape):
    norm, x = kind(), torch.randn(shape)
    with xt.kernel_policy(NORMS), pytest.raises(UnsupportedOperationError, match="by none of the formulas"):
        norm(x)


def test_a_rule_of_a_module_leaves_the_other_its_own_forward():
    model, x = torch.nn.Sequential(Llama(), Llama()), torch.randn(2, 16)
    rules = [{"match": {"op": "rms_norm", "module": "1"}, "use": "cpu.reference"}]
    with xt.kernel_policy(strict(rules=rules), root=model), xt.explain(root=model) as report:
        model(x)
    report.require()
    rows = {row.module: (row.operator, row.status) for row in report.rows if row.op == "rms_norm"}
    assert rows == {"0": ("nn::Llama", "default"), "1": ("aten::_fused_rms_norm", "honoured")}


def test_what_differentiates_otherwise_runs_the_forward_of_the_class():
    norm, x = Llama(), torch.randn(2, 16)
    jacobian = torch.func.jacfwd(norm)(x)
    with (
        pytest.warns(XpuRuntimeWarning, match=r"a transform of torch\.func"),
        xt.kernel_policy(rms_norm="cpu.reference"),
    ):
        assert torch.equal(torch.func.jacfwd(norm)(x), jacobian)
    with pytest.raises(UnsupportedOperationError, match=r"a transform of torch\.func"), xt.kernel_policy(NORMS):
        torch.func.jacfwd(norm)(x)


class Foreign(ForeignNorm):
    id = "package.rms_norm"
    distributions = ()

    def supports(self, call):
        return call.attributes["formula"] in ("llama", "gemma"), "no such formula"

    def forward(self, call, x, weight):
        out = rms_norm(x, weight, epsilon=call.attributes["epsilon"], formula=call.attributes["formula"])
        return (out,), (torch.rsqrt(x.float().pow(2).mean(-1) + call.attributes["epsilon"]),)

    def backward(self, call, saved, grads):
        with torch.enable_grad():
            inputs = [one.detach().requires_grad_() for one in saved.inputs]
            out = rms_norm(*inputs, epsilon=call.attributes["epsilon"], formula=call.attributes["formula"])
            return torch.autograd.grad(out, inputs, grads[0])


@pytest.fixture
def package():
    plugins.register(plugins.KernelBackend("package", "cpu", "1"), Foreign())
    yield
    forget_torch_kernels("package")
    plugins._sources.pop("package", None)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", [Llama, Gemma])
def test_a_kernel_of_another_package_gets_the_formula(kind, compiled):
    torch.manual_seed(0)
    norm = kind().bfloat16()
    x = operands(norm, torch.bfloat16)[0]
    plain, _ = gradients(norm, (x,))
    with xt.kernel_policy(strict(rms_norm="package.rms_norm")), xt.explain() as report:
        torch._dynamo.reset()
        called = torch.compile(norm, backend="aot_eager", fullgraph=True) if compiled else norm
        called.weight, called.zero_grad = norm.weight, norm.zero_grad
        under, _ = gradients(called, (x,))
    assert torch.equal(under[0], plain[0])
    torch.testing.assert_close(under, plain, rtol=2e-2, atol=1e-1)
    rows = [row for row in report.require().rows if row.op == "rms_norm"]
    assert {(row.resolved, row.status) for row in rows} == {("package.rms_norm", "honoured")}


@pytest.mark.usefixtures("package")
def test_the_form_of_a_gradient_is_checked_without_memory_for_it():
    x, weight = torch.randn(1024, 16, requires_grad=True), torch.ones(16, requires_grad=True)
    grad, attributes = torch.ones_like(x), {"epsilon": 1e-6, "formula": "llama"}

    call = TorchCall("rms_norm", "backward", "cpu", "", {}, attributes)
    saved = Saved((x.detach(), weight.detach()), (), ())
    alone = peak_bytes(lambda: Foreign().backward(call, saved, (grad,)), x.device)
    out = perform("rms_norm", {"x": x, "weight": weight}, attributes, "package.rms_norm")
    served = peak_bytes(lambda: torch.autograd.grad(out, (x, weight), grad), x.device)
    assert 0 < alone <= served < alone + x.nbytes


class Graphs:
    def __init__(self):
        self.names = []

    def __call__(self, graph, _):
        self.names.append([str(node.target) for node in graph.graph.nodes if node.op.startswith("call")])
        return graph.forward


def test_compiled_code_has_the_choice_built_in():
    torch._dynamo.reset()
    graphs, model, x = Graphs(), torch.nn.Sequential(Llama(), Gemma()), torch.randn(2, 16)
    plain = model(x)
    compiled = torch.compile(model, fullgraph=True, backend=graphs)
    compiled(x)
    idle = xrt.KernelPolicy(rms_norm=["cuda_raw", "auto"])
    fastest = xrt.KernelPolicy(auto_strategy="best_performance")
    for policy, operators in ((idle, 0), (fastest, 0), (xrt.KernelPolicy(rms_norm="cpu.reference"), 2)):
        with xt.kernel_policy(policy):
            torch.testing.assert_close(compiled(x), plain)
        assert graphs.names[-1].count("xpuruntime.rms_norm") == operators
        assert operators or graphs.names[-1] == graphs.names[0]
    count = len(graphs.names)
    with xt.kernel_policy(xrt.KernelPolicy(rms_norm="cpu.reference")), xt.explain() as report:
        compiled(x)
    assert len(graphs.names) == count
    assert {row.status for row in report.rows if row.op == "rms_norm"} == {"honoured"}
    with pytest.raises(Exception, match=r"would bypass it.*none of the formulas"), xt.kernel_policy(NORMS):
        torch.compile(Unknown(), backend=graphs)(x)


@pytest.mark.parametrize(
    ("family", "dtype"), [("Llama", torch.bfloat16), ("Qwen3", torch.float32), ("Gemma", torch.bfloat16)]
)
def test_models_of_transformers(monkeypatch, family, dtype):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    hf = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64, "pad_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(0)
    model = getattr(hf, f"{family}ForCausalLM")(getattr(hf, f"{family}Config")(**sizes)).to(dtype)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 0.5)
    ids = torch.randint(1, 64, (2, 6))
    plain = model(ids, labels=ids)
    count = sum("RMSNorm" in type(part).__name__ for part in model.modules())
    assert xt.coverage_gaps(NORMS, module=model) == ()
    with xt.kernel_policy(NORMS), xt.explain(root=model) as report:
        out = model(ids, labels=ids)
        out.loss.backward()
    report.require()
    rows = [row for row in report.rows if row.op == "rms_norm"]
    assert {row.status for row in rows} == {"honoured"}
    assert sum(row.count for row in rows if row.phase == "train") == count
    bound = 1e-4 if dtype is torch.float32 else 5e-2
    torch.testing.assert_close(out.logits, plain.logits, rtol=bound, atol=bound)
    with xt.kernel_policy(rms_norm=["cuda_raw", "torch"]), contextlib.suppress(XpuRuntimeWarning):
        assert torch.equal(model(ids).logits, plain.logits)


#: A part of the files of transformers: XPURUNTIME_ALL_PATTERNS=1 looks at all of them.
EVERY = 1 if os.environ.get("XPURUNTIME_ALL_PATTERNS") else 4


def norms_of_transformers():
    """Yield an instance of each class of transformers that may be a norm, in its files that compute a root."""
    folder = Path(importlib.import_module("transformers.models").__file__).parent
    for path in sorted(folder.glob("*/modeling_*.py"))[::EVERY]:
        if re.search(r"sqrt|-0\.5", path.read_text(encoding="utf-8")) is None:
            continue
        try:
            module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
        except ImportError:  # it needs another package
            continue
        for kind in vars(module).values():
            norm = isinstance(kind, type) and issubclass(kind, torch.nn.Module) and kind.__module__ == module.__name__
            if norm and "Norm" in kind.__name__ and "forward" in vars(kind):
                asked = list(inspect.signature(kind).parameters.values())
                needed = [
                    one.name for one in asked if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD
                ]
                with contextlib.suppress(Exception):  # one that takes more than sizes
                    yield kind(**{name: {"eps": 1e-6, "group_size": 16}.get(name, 64) for name in needed})


#: Classes by what they compute in bfloat16, for each version of transformers; the rest have no known formula.
COUNTS = {
    "5.24.0": {
        "after": 154, "inside": 25, "plus_one": 14, "none": 9, "after, groups": 5, "after, gate after": 5,
        "inside, gate after": 4,
    }
}  # fmt: skip


def test_the_classes_of_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    transformers = pytest.importorskip("transformers")
    from xpuruntime.pytorch.adapters.norm_formulas import formula_of_module

    found = Counter()
    for norm in norms_of_transformers():
        formula = formula_of_module(norm.to(torch.bfloat16))
        if formula is not None and formula.op == "rms_norm":
            gate = f"gate {formula.gate}" if formula.gate else ""
            found[", ".join(filter(None, (formula.scale, gate, "groups" if formula.group_size else "")))] += 1
    if EVERY == 1 and transformers.__version__ in COUNTS:
        assert dict(found) == COUNTS[transformers.__version__]
    assert found["after"] > 10 * found["none"]
    assert min(found["inside"], found["plus_one"]) > 0


def test_threads_share_classes():
    norm, x = Llama(), torch.randn(2, 16)
    plain, wrong = norm(x), []

    def run():
        for _ in range(20):
            if not torch.allclose(norm(x), plain, atol=1e-5):
                wrong.append(1)

    with xt.kernel_policy(NORMS):
        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
