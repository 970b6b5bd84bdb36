# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`tune` of training steps: every variant keeps the losses, or is out with a reason; the state is as before."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import xpuruntime.pytorch as xrt_torch  # noqa: E402
from xpuruntime.errors import InputError  # noqa: E402
from xpuruntime.policies import KernelPolicy  # noqa: E402
from xpuruntime.pytorch.capture.api import state_of  # noqa: E402
from xpuruntime.pytorch.capture.captured_state import StateSnapshot  # noqa: E402
from xpuruntime.pytorch.step_tuning.result import (  # noqa: E402
    StepCandidate,
    TunedStep,
    difference,
)
from xpuruntime.pytorch.step_tuning.variants import (  # noqa: E402
    VariantMemoryMeter,
    VariantStep,
)

QUICK: dict[str, Any] = {"rounds": (7, 7), "budget": 2.0}
NATIVE = {"native": None}


class Work:
    """A small model, its optimizer, one batch, and the function that computes the loss."""

    def __init__(self, dropout: float = 0.0, optimizer: Any = torch.optim.AdamW) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Dropout(dropout), torch.nn.Linear(32, 1)
        )
        self.optimizer = optimizer(self.model.parameters(), 0.01)
        self.batch = (torch.randn(8, 16), torch.randn(8, 1))

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.model(x) - y).square().mean()

    def tune(self, **options: Any) -> TunedStep:
        return xrt_torch.tune(self.loss, self.batch, optimizer=self.optimizer, **{**QUICK, **options})

    def train(self, steps: int) -> list[float]:
        numbers = []
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = self.loss(*self.batch)
            loss.backward()
            self.optimizer.step()
            numbers.append(float(loss.detach()))
        return numbers


def rows_of(tuned: TunedStep) -> dict[str, StepCandidate]:
    return {row.name: row for row in tuned.candidates}


def test_state_is_as_before_and_the_winner_trains_as_the_eager_step() -> None:
    work = Work()
    before = copy.deepcopy(work.model.state_dict())
    random = torch.get_rng_state()
    tuned = work.tune(
        launches=["eager", "compile", "capture", "capture:compile", "compile:reduce-overhead"], kernels=NATIVE
    )
    assert all(torch.equal(value, before[name]) for name, value in work.model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in work.model.parameters())
    rows = rows_of(tuned)
    assert rows["eager"].seconds is not None
    assert rows["compile"].ratio is not None
    assert rows["compile"].loss_difference is not None
    assert rows["compile"].loss_difference <= tuned.tolerance
    for name in ("capture", "capture:compile", "compile:reduce-overhead"):
        assert rows[name].code == "infeasible"
        assert "no CUDA graphs" in rows[name].reason
    with tuned:
        got = [float(tuned(*work.batch)) for _ in range(5)]
    assert got == pytest.approx(Work().train(5), rel=1e-4)


def test_a_variant_with_other_losses_never_wins() -> None:
    work = Work()

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found = work.loss(x, y)
        return found * 1.05 if torch.compiler.is_compiling() else found

    tuned = xrt_torch.tune(loss, work.batch, optimizer=work.optimizer, launches=["compile"], kernels=NATIVE, **QUICK)
    assert rows_of(tuned)["compile"].code == "inaccurate"
    assert "losses differ" in rows_of(tuned)["compile"].reason
    assert tuned.name == "eager"
    assert tuned.verdict == "tied"


def test_a_variant_that_fails_is_out_with_its_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import torch._inductor.config as config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    work = Work()
    before = copy.deepcopy(work.model.state_dict())
    with config.patch({"cpp.cxx": ("no-such-compiler",)}):
        tuned = xrt_torch.tune(
            lambda x, y: work.loss(x.cos().tanh(), y), work.batch, optimizer=work.optimizer, launches=["compile"],
            kernels=NATIVE, **QUICK,
        )  # fmt: skip
    assert rows_of(tuned)["compile"].code == "failed"
    assert "no-such-compiler" in rows_of(tuned)["compile"].reason
    assert all(torch.equal(value, before[name]) for name, value in work.model.state_dict().items())


def test_a_variant_that_fails_without_a_text_is_out_by_the_name_of_its_error() -> None:
    work = Work()

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if xrt_torch.get_kernel_policy() is not None:
            raise AssertionError
        return work.loss(x, y)

    kernels = {**NATIVE, "reference": KernelPolicy(matmul="cpu.reference")}
    tuned = xrt_torch.tune(loss, work.batch, optimizer=work.optimizer, launches=["eager"], kernels=kernels, **QUICK)
    row = rows_of(tuned)["eager+reference"]
    assert (tuned.name, row.code, row.reason) == ("eager", "failed", "AssertionError")


@pytest.mark.parametrize("autocast", [False, True])
def test_the_tolerance_is_that_of_what_is_computed_in(autocast: bool) -> None:
    work = Work()

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return (work.model(x).float() - y).square().mean()

    tuned = xrt_torch.tune(loss, work.batch, optimizer=work.optimizer, launches=["eager"], kernels=NATIVE, **QUICK)
    assert tuned.tolerance == (2e-2 if autocast else 1e-3)


def test_memory_of_a_variant_is_without_that_of_others_and_of_copies() -> None:
    held = {"now": 100, "most": 0}
    memory = VariantMemoryMeter(
        torch.device("cpu"),
        allocated=lambda _: held["now"],
        peak=lambda _: held["most"],
        reset=lambda _: held.update(most=held["now"]),
    )
    held["now"] += 50  # copies of parameters
    memory.begin()
    held["most"] = 150 + 70  # activations, and 20 bytes of state that stay
    assert memory.peak() == 170
    held["now"] += 20
    memory.begin()
    held["most"] = 170 + 40
    assert memory.peak() == 160
    held["now"] += 30  # what this variant keeps
    memory.begin()
    held["most"] = 200 + 60
    assert memory.peak() == 180


@pytest.mark.parametrize(
    "optimizer", [torch.optim.AdamW, torch.optim.Adagrad, functools.partial(torch.optim.SGD, momentum=0.9)]
)
def test_state_that_was_added_keeps_its_place_however_often_it_is_given_back(optimizer: Any) -> None:
    work = Work(optimizer=optimizer)
    snapshot = StateSnapshot(state_of(work.loss, work.optimizer, None, None), torch.device("cpu"))
    seen = []
    for _ in range(3):
        first = work.train(3)
        snapshot.restore()
        state = work.optimizer.state
        seen.append((first, [value.data_ptr() for one in state.values() for value in one.values()]))
        for entries in state.values():
            assert all(not value.any() for value in entries.values())
    assert seen[0][1]
    assert seen[1] == seen[0] == seen[2]


def test_state_that_begins_with_a_single_number_is_kept_as_that_number() -> None:
    work = Work(optimizer=torch.optim.AdamW)
    snapshot = StateSnapshot(state_of(work.loss, work.optimizer, None, None), torch.device("cpu"))
    work.train(2)
    entries = list(work.optimizer.state.values())
    assert entries
    assert {first.numel() for entry in entries for first in entry.first.values()} == {1}
    assert any(entry["exp_avg"].any() for entry in entries)
    assert snapshot.restore() == ""
    assert not any(value.any() for entry in work.optimizer.state.values() for value in entry.values())


def test_compiled_steps_are_not_compiled_again_between_policies() -> None:
    import torch._dynamo.utils as utils

    work = Work()
    torch.compiler.reset()  # other tests compile the same function
    utils.counters.clear()
    tuned = work.tune(
        launches=["eager", "compile"],
        kernels={"native": None, "other": KernelPolicy(matmul="cpu.reference")},
        rounds=(9, 9),
        budget=30.0,
    )
    rows = rows_of(tuned)
    assert rows["compile"].ratio is not None
    assert rows["compile+other"].ratio is not None
    assert utils.counters["frames"]["ok"] == 1


def test_random_numbers_widen_the_tolerance_and_are_noted() -> None:
    tuned = Work(dropout=0.5).tune(launches=["eager"], kernels=NATIVE)
    assert tuned.tolerance > 1e-3
    assert "random numbers" in tuned.notes[0]
    assert Work().tune(launches=["eager"], kernels=NATIVE).notes == ()


def test_policies_are_raced_and_the_winner_is_called_inside_its_own() -> None:
    work = Work()
    tuned = work.tune(
        launches=["eager", "compile"], kernels={"reference": KernelPolicy(matmul="cpu.reference", layer_norm="auto")}
    )
    rows = rows_of(tuned)
    assert list(rows) == ["eager", "eager+reference", "compile+reference"]
    for name in ("eager+reference", "compile+reference"):
        assert rows[name].code in ("slower", "not_faster", "undecided", "beaten", "winner")


def test_a_step_with_a_policy_is_refused_outside_of_its_block(tmp_path: Path) -> None:
    seen = []
    policy = KernelPolicy(matmul="cpu.reference")

    def step(x: torch.Tensor) -> torch.Tensor:
        seen.append(xrt_torch.get_kernel_policy())
        return x @ x

    tuned = TunedStep(
        step, "eager+reference", policy, [StepCandidate("eager+reference", "winner", "")], "winner", 0, ()
    )
    with pytest.raises(InputError, match="with tuned:"):
        tuned(torch.ones(2, 2))
    with tuned:
        lock = tuned.lock(tmp_path / "step.lock", torch.ones(2, 2))
    assert seen[0].matmul == "cpu.reference"
    assert [call.kernel for call in lock.identity.calls] == ["cpu.reference"]
    assert xrt_torch.get_kernel_policy() is None
    plain = TunedStep(step, "eager", None, [StepCandidate("eager", "control", "")], "tied", 0, ())
    with pytest.raises(InputError, match="PyTorch's own kernels"):
        plain.lock(tmp_path / "other.lock", torch.ones(2, 2))


def test_a_reset_drops_what_was_captured_and_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: done.append("compiler"))
    captured = VariantStep(lambda x: x + 1, None, lambda: done.append("graphs"))
    rows = [StepCandidate("eager", "control", "")]
    for step, torch_graphs, expected in (
        (captured, False, ["graphs"]),
        (captured, True, ["graphs", "compiler"]),
        (VariantStep(lambda x: x + 1, "default"), False, []),
    ):
        done.clear()
        tuned = TunedStep(step, "eager", None, rows, "tied", 0, (), torch_graphs=torch_graphs)
        tuned.reset()
        assert done == expected
        assert float(tuned(torch.ones(()))) == 2


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"launches": ["captured"]}, "launches has"),
        ({"launches": "eager"}, "give a list"),
        ({"launches": 3}, "launches is 3"),
        ({"kernels": {"fast": "auto"}}, "give a KernelPolicy"),
        ({"kernels": ["fast"]}, "kernels is a list"),
        ({"rtol": -1}, "rtol is -1"),
        ({"rtol": "1e-3"}, "rtol is '1e-3'"),
        ({"min_effect": -1}, "min_effect is -1"),
        ({"min_effect": "2%"}, "min_effect is '2%'"),
        ({"confidence": 0}, "confidence is 0"),  # it would call any variant faster
        ({"confidence": 1}, "confidence is 1"),
        ({"rounds": 9}, "rounds is 9"),
        ({"rounds": (9, 3)}, r"rounds is \(9, 3\)"),
        ({"rounds": (0, 0)}, r"rounds is \(0, 0\)"),
        ({"budget": "2s"}, "budget is '2s'"),
        ({"budget": 0}, "budget is 0"),
        ({"budget": float("nan")}, "budget is nan"),
        ({"before_step": 3}, "before_step is a int"),
        ({"scaler": 3}, "scaler is a int"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        Work().tune(**options)


def test_a_step_that_computes_its_loss_several_times_is_refused() -> None:
    with pytest.raises(InputError, match="do the whole step in fn"):
        Work(optimizer=torch.optim.LBFGS).tune()


def test_an_active_policy_is_refused() -> None:
    with xrt_torch.kernel_policy(matmul="cpu.blas"), pytest.raises(InputError, match="a kernel policy is active"):
        Work().tune()


def test_an_eager_step_that_fails_raises_and_gives_the_state_back() -> None:
    work = Work()
    before = copy.deepcopy(work.model.state_dict())
    with pytest.raises(RuntimeError, match="shapes"):
        xrt_torch.tune(work.loss, (torch.ones(8, 3), work.batch[1]), optimizer=work.optimizer, **QUICK)
    assert all(torch.equal(value, before[name]) for name, value in work.model.state_dict().items())


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_capturing_modes_are_refused_inside_of_a_capture(mode: str) -> None:
    work = Work()
    with pytest.raises(InputError, match="captures CUDA graphs by itself"):
        xrt_torch.capture_graph(work.loss, optimizer=work.optimizer, compile={"mode": mode})


def test_differences_of_losses() -> None:
    nan, inf = float("nan"), float("inf")
    assert difference([1.0, 2.0], [1.0, 2.2]) == pytest.approx(0.2 / 2.2)
    assert difference([nan], [1.0]) == inf
    assert difference([nan], [nan]) == 0
    assert difference([inf], [inf]) == 0


def test_cancelled_before_the_first_round_leaves_the_eager_step():
    net = torch.nn.Linear(4, 1)
    tuned = xrt_torch.tune(
        lambda x: net(x).square().mean(),
        (torch.ones(2, 4),),
        optimizer=torch.optim.SGD(net.parameters(), 0.1),
        launches=["eager"],
        kernels={"native": None, "blas": KernelPolicy(matmul="cpu.blas")},
        cancel=lambda: True,
    )
    row = next(candidate for candidate in tuned.candidates if candidate.name != "eager")
    assert (row.code, row.reason) == ("undecided", "cancelled before its first round was timed")
    assert (tuned.name, tuned.verdict) == ("eager", "undecided")
