# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Attention by products in plans of the torch engine: that no kernel of attention runs is said before anything does."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest

import xpuruntime as xrt
from xpuruntime.engines.base import Request
from xpuruntime.engines.torch.controls import resolve_settings
from xpuruntime.policies import Policy

if TYPE_CHECKING:
    from pathlib import Path

    from xpuruntime.evidence.records import Control

torch = pytest.importorskip("torch")
functional = torch.nn.functional
pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.:FutureWarning"),  # of decomposing, in 2.13
]
X = torch.randn(2, 6, 8)
ASKED = {"attention": "cpu.reference"}
TORCH = {"match": {"module": "first", "op": "attention"}, "use": "torch"}


class Net(torch.nn.Module):
    """Two layers of attention: each with its weights, without them, or none."""

    def __init__(self, *need_weights: bool | None) -> None:
        super().__init__()
        self.first = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        self.second = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x: Any) -> Any:
        for layer, need in zip((self.first, self.second), self.need_weights, strict=False):
            x = layer(x, x, x)[0] if need is None else layer(x, x, x, need_weights=need)[0]
        return torch.softmax(x, -1)


class Masked(Net):
    def forward(self, x: Any) -> Any:
        return self.first(x, x, x, attn_mask=torch.zeros(6, 6))[0]


class Function(torch.nn.Module):
    """Calls the function itself."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = torch.nn.Parameter(torch.randn(24, 8)), torch.nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Any) -> Any:
        rest = (8, 2, self.into, None, None, None, False, 0.0, self.out, None)
        return functional.multi_head_attention_forward(x, x, x, *rest, training=False)[0]


class Plain(torch.nn.Module):
    """Attention by the function for it."""

    def forward(self, x: Any) -> Any:
        return functional.scaled_dot_product_attention(x, x, x)


class Written(torch.nn.Module):
    """Attention of somebody's own."""

    def forward(self, x: Any) -> Any:
        return torch.softmax(x @ x.mT, -1) @ x


class WrittenNorm(torch.nn.Module):
    """An RMS norm of somebody's own."""

    def forward(self, x: Any) -> Any:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def saved(folder: Path, net: Any, how: str = "program") -> Path:
    path = folder / f"{how}.pt2"
    program = torch.export.export(net.eval(), (X,), strict=how == "strict")
    if how == "decomposed":
        program = program.run_decompositions()
    if how == "no functions":
        for node in program.graph.nodes:
            node.meta.pop("torch_fn", None)
    torch.export.save(program, path)
    return path


def model_of(folder: Path, net: Any, how: str) -> Any:
    from xpuruntime.engines.torch.program.reading import inspect_module, inspect_program

    return inspect_module(net.eval(), (X,)) if how == "module" else inspect_program(str(saved(folder, net, how)))


def controls(folder: Path, net: Any, kernels: Any, how: str = "program", **execution: Any) -> dict[str, Control]:
    policy = Policy(kernels=kernels, execution=execution)
    request = Request(model=model_of(folder, net, how), device="cpu", policy=policy)
    return {one.key: one for one in resolve_settings(request)[1]}


ALL = pytest.mark.parametrize("how", ["module", "program", "strict", "decomposed", "no functions"])
BOTH = pytest.mark.parametrize("how", ["module", "program"])


@ALL
@pytest.mark.parametrize("need", [None, True])
def test_a_key_that_reaches_nothing_is_unsupported(how: str, need: bool | None, tmp_path: Path) -> None:
    found = controls(tmp_path, Net(need), ASKED, how)["kernels.attention"]
    assert (found.enforceability, found.resolved) == ("unsupported", "-")
    name = "first/_softmax" if how in ("module", "decomposed") else "first/softmax"
    assert f"no kernel of attention is called at {name!r}: it is products and a softmax" in found.reason
    assert "need_weights=True" in found.reason
    assert "need_weights=False" in str(found.fix)


@BOTH
def test_masks_and_calls_of_the_function_are_seen(how: str, tmp_path: Path) -> None:
    for net in (Masked(None), Function()):
        assert controls(tmp_path, net, ASKED, how)["kernels.attention"].enforceability == "unsupported"


@pytest.mark.parametrize("how", ["module", "program", "strict", "no functions"])
def test_without_its_weights_it_is_attention(how: str, tmp_path: Path) -> None:
    encoder = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)
    for net in (Net(False), encoder):
        assert controls(tmp_path, net, ASKED, how)["kernels.attention"].enforceability == "enforced"


def test_decomposed_attention_is_no_operator_any_more(tmp_path: Path) -> None:
    for net in (Net(False), Plain(), torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)):
        model = model_of(tmp_path, net, "decomposed")
        left = [node.op for node in model.nodes if "attention" in node.op]
        found = controls(tmp_path, net, ASKED, "decomposed")["kernels.attention"]
        assert found.enforceability == ("enforced" if left else "unsupported")
        assert ("or of a decomposed program" in found.reason) is not bool(left)
        whole = controls(tmp_path, net, ASKED)["kernels.attention"]
        assert whole.enforceability == "enforced"


@BOTH
def test_a_key_that_reaches_another_layer_is_advisory(how: str, tmp_path: Path) -> None:
    found = controls(tmp_path, Net(True, False), ASKED, how)["kernels.attention"]
    assert (found.enforceability, found.resolved) == ("advisory", "cpu.reference")
    assert "each other call is served by it, but no kernel of attention is called at 'first/" in found.reason
    both = controls(tmp_path, Net(True, True), ASKED, how)["kernels.attention"]
    assert "and 1 more" in both.reason


@BOTH
def test_rules_find_the_layer(how: str, tmp_path: Path) -> None:
    for match in ({"module": "first", "op": "attention"}, {"node": "first/*soft*"}, {"op": "attention", "head_dim": 4}):
        rules = [{"match": match, "use": "cpu.reference"}]
        found = controls(tmp_path, Net(True), {"rules": rules}, how)["kernels.rules[0]"]
        assert found.enforceability == "unsupported", match
        assert "no kernel of attention is called" in found.reason
    rules = [{"match": {"module": "first"}, "use": "cpu.reference"}]  # for its products too
    assert controls(tmp_path, Net(True), {"rules": rules}, how)["kernels.rules[0]"].enforceability == "advisory"


@pytest.mark.parametrize("how", ["program"])
@pytest.mark.parametrize(
    "kernels",
    [
        {"rules": [TORCH], "attention": "cpu.reference"},
        {"attention": "torch.math"},
        {"attention": ["cpu.reference", "auto"]},
        {"attention": "auto"},
        {"rules": [{"match": {"op": "attention", "dtype": "bf16"}, "use": "cpu.reference"}]},
        {"rules": [{"match": {"op": "attention", "head_dim": 8}, "use": "cpu.reference"}]},
        {"rules": [{"match": {"op": "attention", "module": "second"}, "use": "cpu.reference"}]},
        {"matmul": "cpu.reference"},
    ],
)
def test_what_it_does_is_what_is_asked_for(kernels: Any, how: str, tmp_path: Path) -> None:
    # What PyTorch 2.11 exports of the second layer cannot take the strides that its kernel `math` gives.
    net = (Net(True) if kernels == {"attention": "torch.math"} else Net(True, False)).eval()
    found = controls(tmp_path, net, kernels, how)
    assert {one.enforceability for key, one in found.items() if key.startswith("kernels.")} == {"enforced"}
    given = {"example_inputs": (X,)} if how == "module" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("error", xrt.XpuRuntimeWarning)
        model = net if how == "module" else saved(tmp_path, net)
        with xrt.InferenceSession(
            model, policy={"mode": "strict", "kernels": kernels}, device="cpu", engine="torch", **given
        ) as session:
            torch.testing.assert_close(session.run({"x": X})["output"], net(X).detach(), rtol=1e-4, atol=1e-5)
            assert not [
                observation
                for observation in session.explain({"x": X}, runs=1).observations
                if observation.status == "substituted"
            ]


def test_the_type_is_the_one_that_it_is_converted_to(tmp_path: Path) -> None:
    rules = [{"match": {"op": "attention", "dtype": "bf16"}, "use": "cpu.reference"}]
    found = controls(tmp_path, Net(True), {"rules": rules}, precision="bf16")["kernels.rules[0]"]
    assert found.enforceability == "unsupported"


def test_compiled_programs_say_both(tmp_path: Path) -> None:
    options = {"torch": {"mode": "compile"}}
    found = controls(tmp_path, Net(True, False), ASKED, provider_options=options)["kernels.attention"]
    assert (found.enforceability, "fuses" in found.reason) == ("advisory", True)
    assert "no kernel of attention is called" in found.reason


@BOTH
def test_attention_that_is_written_out_is_not_served_and_the_plan_says_so(how: str, tmp_path: Path) -> None:
    found = controls(tmp_path, Written(), ASKED, how)["kernels.attention"]
    assert (found.enforceability, found.resolved) == ("unsupported", "-")
    assert "the model writes attention out" in found.reason
    plain = controls(tmp_path, torch.nn.Linear(8, 8), ASKED, how)["kernels.attention"]
    assert plain.enforceability == "unsupported"
    assert plain.reason.startswith("no attention was found in the model")


@BOTH
@pytest.mark.parametrize("use", ["torch.rms_norm", ["torch.layer_norm", "torch.rms_norm"]])
def test_rules_name_what_is_written_out_and_the_operations_of_their_kernels(how: str, use: Any, tmp_path: Path) -> None:
    rules = [{"match": {"module": "*"}, "use": use}]
    found = controls(tmp_path, WrittenNorm(), {"rules": rules}, how)["kernels.rules[0]"]
    assert (found.enforceability, "the model writes rms_norm out" in found.reason) == ("unsupported", True)
    absent = controls(tmp_path, torch.nn.ReLU(), {"rules": rules}, how)["kernels.rules[0]"]
    names = "rms_norm" if isinstance(use, str) else "layer_norm or rms_norm"
    assert absent.reason.startswith(f"no {names} was found in the model")


@BOTH
def test_strict_refuses_it_in_the_plan(how: str, tmp_path: Path) -> None:
    net = Net(True, False).eval()
    model, given = (net, {"example_inputs": (X,)}) if how == "module" else (saved(tmp_path, net), {})
    strict = {"mode": "strict", "kernels": ASKED}
    for call in (xrt.plan, xrt.InferenceSession):
        with pytest.raises(xrt.UnsupportedOperationError, match=r"called at 'first/.*Fix: call nn.MultiheadAttention"):
            call(model, policy=strict, device="cpu", engine="torch", **given)


@BOTH
@pytest.mark.parametrize("second", [None, False])
def test_prefer_tells_what_ran(how: str, second: bool | None, tmp_path: Path) -> None:
    net = (Net(True) if second is None else Net(True, second)).eval()
    model, given = (net, {"example_inputs": (X,)}) if how == "module" else (saved(tmp_path, net), {})
    with pytest.warns(xrt.XpuRuntimeWarning, match="no kernel of attention is called"):
        session = xrt.InferenceSession(model, policy={"kernels": ASKED}, device="cpu", engine="torch", **given)
    with session, warnings.catch_warnings():
        warnings.simplefilter("ignore", xrt.XpuRuntimeWarning)
        report = session.explain({"x": X}, runs=1)
    (key,) = (observation for observation in report.observations if observation.key == "kernels.attention")
    rows = [decision for decision in report.decisions if decision.op == "attention" and decision.chosen == "torch.math"]
    assert [(row.source, row.asked_by) for row in rows] == [("fallback", "kernels.attention")] * len(rows)
    assert rows
    if second is None:
        assert key.status == "unsupported"
    else:
        assert key.status == "substituted"
        assert "softmax" in key.reason
        assert any(decision.chosen == "cpu.reference" for decision in report.decisions)
