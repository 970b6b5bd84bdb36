# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Kernels of other packages in tuned steps: judged by the whole compiled step, beside the same step without them."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch_kernels  # noqa: E402

import xpuruntime.pytorch as xrt_torch  # noqa: E402
from xpuruntime.measuring.rounds import measure  # noqa: E402
from xpuruntime.measuring.statistics import Margin  # noqa: E402
from xpuruntime.ops import plugins  # noqa: E402
from xpuruntime.policies import KernelPolicy  # noqa: E402
from xpuruntime.pytorch.step_tuning.result import StepCandidate, TunedStep, decide  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_policy_is_left", "own_tuning_cache")


class Normed(torch.nn.Module):
    """Two linear layers with an RMS norm and a gate between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = torch.nn.Linear(16, 32), torch.nn.Linear(32, 1)
        self.norm = torch.nn.RMSNorm(32, eps=1e-6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.nn.functional.silu(self.norm(self.inner(x))))


@pytest.fixture
def foreign(tmp_path, monkeypatch):
    """A package with an RMS norm, installed into a folder."""
    monkeypatch.syspath_prepend(torch_kernels.install(tmp_path))
    plugins.register(plugins.KernelBackend("foreign", "cpu", version="1.0"), torch_kernels.ForeignNorm())
    yield tmp_path
    torch_kernels.forget()


def tuned_step(kernels: dict[str, KernelPolicy | None], **options: Any) -> TunedStep:
    model = Normed()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x, y = torch.randn(8, 16), torch.randn(8, 1)
    return xrt_torch.tune(
        lambda x, y: (model(x) - y).square().mean(), (x, y), optimizer=optimizer, kernels=kernels,
        **{"launches": ["eager", "compile"], "rounds": (7, 7), "budget": 0.5, **options},
    )  # fmt: skip


def rows_of(tuned: TunedStep) -> dict[str, StepCandidate]:
    return {row.name: row for row in tuned.candidates}


def raced(**seconds: float) -> Any:
    """Return what rounds of these times say, of eager and compiled steps with a policy or without."""
    named = {name.replace("_", "+"): time for name, time in seconds.items()}
    samplers = {
        name: lambda calls, samples, time=time: [time * calls] * samples for name, time in named.items()
    }  # no clock: each turn takes what is stated
    pairs = {name: "compile" for name in named if name.startswith("compile+")}
    measured = measure(
        samplers, control="eager", pairs=pairs, margin=Margin(0.02, 0.0), rounds=(9, 61), warm=0.0, statistic="mean"
    )
    found, winner, verdict = decide([StepCandidate(name, "undecided", "") for name in named], measured, 0.02)
    return {row.name: row for row in found}, winner, verdict


def test_a_kernel_that_gains_nothing_in_the_compiled_step_does_not_win_it():
    rows, winner, verdict = raced(eager=3.0, compile=1.0, compile_norm=0.99, compile_slow=1.2)
    assert (winner, verdict) == ("compile", "winner")
    assert (rows["compile+norm"].code, rows["compile+slow"].code) == ("not_faster", "slower")
    assert "compile without the policy" in rows["compile+norm"].reason
    assert rows["compile+norm"].launch_ratio[0] == pytest.approx(0.99)
    assert rows["compile+norm"].ratio[0] == pytest.approx(0.33)


def test_a_kernel_that_makes_the_compiled_step_faster_wins_it():
    rows, winner, verdict = raced(eager=3.0, compile=1.0, compile_norm=0.9, compile_unit=0.95, eager_norm=0.5)
    assert (winner, verdict) == ("eager+norm", "winner")
    assert rows["compile+norm"].code == rows["compile+unit"].code == "beaten"
    assert raced(eager=3.0, compile=1.0, compile_norm=0.9)[1] == "compile+norm"
    assert raced(eager=1.0, compile=2.0, compile_norm=1.5)[1:] == ("eager", "tied")


def test_kernels_of_a_package_are_raced_in_compiled_code(foreign):
    tuned = tuned_step({"native": None, "foreign": KernelPolicy(rms_norm="foreign.rms_norm")})
    rows = rows_of(tuned)
    assert list(rows) == ["eager", "compile", "eager+foreign", "compile+foreign"]
    assert rows["compile+foreign"].launch_ratio is not None
    assert rows["eager+foreign"].launch_ratio is None
    assert rows["compile+foreign"].loss_difference <= tuned.tolerance


@pytest.mark.filterwarnings("ignore:.*matched no call:xpuruntime.errors.XpuRuntimeWarning")
@pytest.mark.filterwarnings("ignore:.*has no kernel for:xpuruntime.errors.XpuRuntimeWarning")
def test_a_policy_of_which_no_kernel_runs_is_out(foreign):
    rule = {"match": {"op": "rms_norm", "module": "elsewhere.*"}, "use": "foreign.rms_norm"}
    anywhere = {"match": {"module": "*"}, "use": "compiled.swiglu"}
    kernels = {
        "convolution": KernelPolicy(conv="cpu.gemm_conv"), "rule": KernelPolicy(rules=[rule]),
        "anywhere": KernelPolicy(rules=[anywhere]),
    }  # fmt: skip
    rows = rows_of(tuned_step(kernels))
    for name in (f"{launch}+{policy}" for launch in ("eager", "compile") for policy in kernels):
        assert rows[name].code == "infeasible", rows[name].reason
        assert "no call of" in rows[name].reason


class Loss(plugins.TorchKernel):
    """A cross entropy of another package."""

    id = "foreign.cross_entropy"
    op = "cross_entropy"
    distributions = ()

    def supports(self, call: Any) -> tuple[bool, str]:
        return True, ""

    def forward(self, call: Any, logits: Any, target: Any) -> Any:
        seen = target != call.attributes["ignore_index"]
        rows = torch.log_softmax(logits.double(), -1).gather(-1, torch.where(seen, target, 0)[:, None])[:, 0]
        return (-(rows * seen).sum().div(seen.sum()).to(logits.dtype),), ()

    def backward(self, call: Any, saved: Any, grads: Any) -> Any:
        logits, target = saved.inputs
        seen = target != call.attributes["ignore_index"]
        shares = torch.softmax(logits.double(), -1)
        shares[torch.arange(len(target)), torch.where(seen, target, 0)] -= 1
        return (shares * (seen * grads[0] / seen.sum())[:, None]).to(logits.dtype), None

    def saved_like(self, call: Any, *tensors: Any) -> Any:
        return ()


def tuned_loss() -> TunedStep:
    plugins.register(plugins.KernelBackend("foreign", "cpu", version="1.0"), Loss())
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 32)
    x, y = torch.randn(8, 16), torch.randint(0, 32, (8,))
    return xrt_torch.tune(
        lambda x, y: torch.nn.functional.cross_entropy(model(x).float(), y), (x, y),
        optimizer=torch.optim.SGD(model.parameters(), 0.01), launches=["compile"], rounds=(7, 7), budget=0.5,
        kernels={"native": None, "loss": KernelPolicy(cross_entropy="foreign.cross_entropy")},
    )  # fmt: skip


@pytest.mark.parametrize("says", [True, False])
def test_the_loss_of_a_compiled_step_is_served(foreign, monkeypatch, says):
    monkeypatch.setenv("XPURUNTIME_CANARY", "off")
    if not says:  # as PyTorch 2.11, which does not say that it compiles once AOTAutograd traces
        monkeypatch.setattr(torch.compiler, "_compile_session_context", contextlib.nullcontext, raising=False)
    row = rows_of(tuned_loss())["compile+loss"]
    assert row.launch_ratio is not None, row.reason


@pytest.mark.filterwarnings("ignore:.*Sundays:xpuruntime.errors.XpuRuntimeWarning")
def test_why_compiled_code_is_not_served_is_in_the_row(foreign, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(Loss, "supports", lambda *_: (False, "it serves on Sundays"))
    row = rows_of(tuned_loss())["compile+loss"]
    assert row.code == "infeasible"
    assert "it serves on Sundays" in row.reason


def test_a_kernel_that_is_wrong_is_out_by_its_losses(foreign, monkeypatch):
    monkeypatch.setenv("XPURUNTIME_CANARY", "off")
    torch_kernels.install(foreign, factor=3.0)
    importlib.invalidate_caches()
    rows = rows_of(tuned_step({"foreign": KernelPolicy(rms_norm="foreign.rms_norm")}, launches=["compile"]))
    assert list(rows) == ["eager", "compile+foreign"]
    assert rows["compile+foreign"].code == "inaccurate"


@pytest.mark.parametrize(
    "policy",
    [
        KernelPolicy(rms_norm="foreign.rms_norm"),
        KernelPolicy(rules=[{"match": {"module": "*"}, "use": ["foreign.rms_norm", "torch"]}]),
    ],
)
def test_a_result_is_kept_for_the_versions_that_were_raced(foreign, policy):
    seen: list[Any] = []
    kernels = {"native": None, "foreign": policy}
    options = {"cache_key": "normed", "progress": seen.append}
    first = tuned_step(kernels, **options)
    assert seen
    seen.clear()
    again = tuned_step(kernels, **options)
    assert not seen
    assert (again.name, again.verdict) == (first.name, first.verdict)
    assert "with the same versions" in rows_of(again)["compile"].reason
    assert again.policy == first.policy
    torch_kernels.install(foreign, version="2.0")
    tuned_step(kernels, **options)
    assert seen


def test_a_result_is_kept_for_the_options_of_the_optimizer_and_for_capturable_ones():
    seen: list[Any] = []
    options = {"cache_key": "optimizer", "progress": seen.append, "launches": ["eager", "compile"]}

    def is_raced(*, foreach: bool = False, capturable: bool = False) -> bool:
        seen.clear()
        model = Normed()
        optimizer = torch.optim.AdamW(model.parameters(), 0.01, foreach=foreach)
        x, y = torch.randn(8, 16), torch.randn(8, 1)
        xrt_torch.tune(
            lambda x, y: (model(x) - y).square().mean(), (x, y), optimizer=optimizer, kernels={"native": None},
            rounds=(7, 7), budget=0.5, make_capturable=capturable, **options,
        )  # fmt: skip
        return bool(seen)

    assert [is_raced(), is_raced()] == [True, False]
    assert [is_raced(foreach=True), is_raced(capturable=True)] == [True, True]
    assert [is_raced(foreach=True), is_raced(capturable=True)] == [False, False]
