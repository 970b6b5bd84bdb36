# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Recurrent layers in plans of the torch engine: what no product inside can have is said before anything runs."""

from __future__ import annotations

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
pytestmark = [
    pytest.mark.torch,
    # Of PyTorch's own, on exporting such layers, and where oneDNN has no kernel.
    pytest.mark.filterwarnings("ignore:.*_flat_weights.* assigned during export:UserWarning"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported:UserWarning"),
]


class Net(torch.nn.Module):
    """A recurrent layer, and a product after it where that is asked for."""

    def __init__(self, rnn: Any, last: Any = None) -> None:
        super().__init__()
        self.rnn, self.last = rnn, torch.nn.Identity() if last is None else last

    def forward(self, x: Any) -> Any:
        return self.last(self.rnn(x)[0])


X = torch.zeros(3, 2, 8)
RULE = {"match": {"module": "rnn"}, "use": "torch"}


def saved(folder: Path, net: Any, x: Any = X) -> Path:
    torch.export.save(torch.export.export(net.eval(), (x,)), folder / "net.pt2")
    return folder / "net.pt2"


def controls(model: Any, kernels: Any, device: str = "cpu", x: Any = X, **execution: Any) -> dict[str, Control]:
    """What the torch engine says of each key, on a device that need not be there."""
    from xpuruntime.engines.torch.program.reading import inspect_module, inspect_program

    info = inspect_module(model.eval(), (x,)) if isinstance(model, torch.nn.Module) else inspect_program(str(model))
    policy = Policy.coerce({"execution": {"engine": "torch", **execution}, "kernels": kernels})
    return {one.key: one for one in resolve_settings(Request(model=info, device=device, policy=policy))[1]}


@pytest.mark.parametrize("exported", [True, False])
def test_a_key_that_reaches_other_products_is_advisory(exported: bool, tmp_path: Path) -> None:
    net = Net(torch.nn.LSTM(8, 8), torch.nn.Linear(8, 4))
    found = controls(saved(tmp_path, net) if exported else net, {"matmul": "cpu.reference"})["kernels.matmul"]
    assert (found.enforceability, found.resolved) == ("advisory", "cpu.reference")
    assert f"'rnn/{'lstm' if exported else 'mkldnn_rnn_layer'}' by one kernel" in found.reason
    assert "use: torch" in str(found.fix)


def test_a_key_that_reaches_nothing_else_is_unsupported(tmp_path: Path) -> None:
    kernels = {"rules": [{"match": {"module": "rnn"}, "use": "cpu.reference"}], "matmul": "cpu.blas"}
    found = controls(saved(tmp_path, Net(torch.nn.LSTM(8, 8), torch.nn.Linear(8, 4))), kernels)
    assert found["kernels.rules[0]"].enforceability == "unsupported"
    assert found["kernels.matmul"].enforceability == "enforced"
    alone = controls(Net(torch.nn.LSTM(8, 8)), {"matmul": "cpu.reference"})
    assert alone["kernels.matmul"].enforceability == "unsupported"


def test_rules_by_node_find_the_layer(tmp_path: Path) -> None:
    rules = [{"match": {"node": "rnn/lstm"}, "use": "cpu.reference"}]
    found = controls(saved(tmp_path, Net(torch.nn.LSTM(8, 8), torch.nn.Linear(8, 4))), {"rules": rules})
    assert "one kernel" in found["kernels.rules[0]"].reason


@pytest.mark.parametrize(
    "kernels",
    [
        {"rules": [RULE], "matmul": "cpu.reference"},
        {"matmul": ["cpu.reference", "torch"]},
        {"matmul": "auto"},
        {"rules": [{"match": {"op": "matmul", "dtype": "bf16"}, "use": "cpu.reference"}]},
    ],
)
def test_what_does_not_ask_it_of_the_layer_stays_enforced(kernels: Any) -> None:
    found = controls(Net(torch.nn.LSTM(8, 8), torch.nn.Linear(8, 4)), kernels)
    assert {one.enforceability for key, one in found.items() if key.startswith("kernels.")} == {"enforced"}


def test_a_rule_by_a_size_may_be_for_the_products_of_the_layer() -> None:
    """How many rows they have is known when they run, by the one kernel: the rule is not promised to hold for them."""
    rules = {"rules": [{"match": {"op": "matmul", "m": "<=16"}, "use": "cpu.reference"}]}
    found = controls(Net(torch.nn.LSTM(8, 8), torch.nn.Linear(8, 4)), rules)["kernels.rules[0]"]
    assert found.enforceability == "advisory"
    assert "one kernel" in found.reason


def test_layers_that_multiply_step_by_step_are_enforced_and_obey(tmp_path: Path) -> None:
    x = torch.randn(3, 2, 8)
    for layer in (torch.nn.GRU(8, 8), torch.nn.RNN(8, 8), torch.nn.LSTM(8, 8, proj_size=4)):
        path = saved(tmp_path, Net(layer))
        policy = {"mode": "strict", "kernels": {"matmul": "cpu.reference"}}
        with xrt.InferenceSession(path, policy=policy, device="cpu", engine="torch") as session:
            (control,) = (control for control in session.plan.controls if control.key == "kernels.matmul")
            assert (control.enforceability, control.resolved) == ("enforced", "cpu.reference")
            report = session.explain({session.inputs[0].name: x.numpy()}, runs=1)
        assert {decision.chosen for decision in report.decisions} == {"cpu.reference"}


@pytest.mark.needs_build("cublas")
def test_cudnn_has_one_for_all_of_them(tmp_path: Path) -> None:
    for layer in (torch.nn.LSTM(8, 8, proj_size=4), torch.nn.GRU(8, 8), torch.nn.RNN(8, 8)):
        path = saved(tmp_path, Net(layer, torch.nn.Linear(layer.proj_size or 8, 4)))
        rules = [{"match": {"op": "matmul", "device": "cuda"}, "use": "cublas.cublas"}]
        found = controls(path, {"rules": rules}, device="cuda:0")["kernels.rules[0]"]
        assert (found.enforceability, "one kernel" in found.reason) == ("advisory", True)


def test_the_type_is_the_one_that_it_is_converted_to() -> None:
    rules = [{"match": {"op": "matmul", "dtype": "bf16"}, "use": "cpu.reference"}]
    net = Net(torch.nn.LSTM(8, 8), torch.nn.Linear(8, 4))
    assert controls(net, {"rules": rules}, precision="bf16")["kernels.rules[0]"].enforceability == "advisory"


def test_strict_refuses_it_in_the_plan_and_prefer_tells_what_ran(tmp_path: Path) -> None:
    path = saved(tmp_path, Net(torch.nn.LSTM(8, 8), torch.nn.Linear(8, 4)))
    strict = {"mode": "strict", "kernels": {"matmul": "cpu.reference"}}
    with pytest.raises(xrt.UnsupportedOperationError, match=r"'rnn/lstm' by one kernel.* Fix: put a rule"):
        xrt.plan(path, policy=strict, device="cpu", engine="torch")
    with (
        pytest.warns(xrt.XpuRuntimeWarning, match="by one kernel"),
        xrt.InferenceSession(path, policy={**strict, "mode": "prefer"}, device="cpu", engine="torch") as session,
        pytest.warns(xrt.XpuRuntimeWarning, match="recurrent layer"),
    ):
        report = session.explain({session.inputs[0].name: torch.randn(3, 2, 8).numpy()}, runs=1)
    (key,) = (observation for observation in report.observations if observation.key == "kernels.matmul")
    assert (key.status, "'rnn/lstm'" in key.reason) == ("substituted", True)
    assert any(decision.chosen == "cpu.reference" for decision in report.decisions)
