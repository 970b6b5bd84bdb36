# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Policies in trainings of transformers, Lightning, accelerate and Ray Train, each with its own trainer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch", reason="pip install torch")

from tiny_training import POLICY, Net, batches, uneven_step  # noqa: E402

import xpuruntime as xrt  # noqa: E402
import xpuruntime.pytorch as xrt_torch  # noqa: E402
from xpuruntime.integrations.training import LOCK_FILE  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.filterwarnings("ignore")  # of the frameworks, about processors and versions


def modules_of(lock: Any) -> set[str]:
    return {one.module for one in lock.identity.calls}


class Stop(KeyboardInterrupt):
    """An interruption that no framework knows."""


# --- transformers ----------------------------------------------------------------------------------------------------


@pytest.fixture
def hf(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    pytest.importorskip("accelerate", reason="pip install accelerate")
    return pytest.importorskip("transformers", reason="pip install 'transformers[torch]'")


def hf_trainer(hf: Any, out: Path, *, steps: int = 4, policy: Any = POLICY, **more: Any) -> tuple[Any, Any]:
    from xpuruntime.integrations.transformers import PolicyCallback

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            hidden = self.last(torch.relu(self.first(x)))
            return {"loss": (hidden - labels).square().mean(), "logits": hidden}

    class Steps(hf.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if (at := more.get("stop_at")) and state.global_step == at:
                raise Stop

    callback = PolicyCallback(policy)
    data = [{"x": torch.randn(8), "labels": torch.randn(4)} for _ in range(32)]
    arguments = hf.TrainingArguments(
        str(out), max_steps=steps, per_device_train_batch_size=2, gradient_accumulation_steps=2, save_steps=2,
        use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=100,
    )  # fmt: skip
    trainer = hf.Trainer(model=Model(), args=arguments, train_dataset=data, callbacks=[callback, Steps()])
    return trainer, callback


def test_transformers(hf: Any, tmp_path: Path) -> None:
    trainer, callback = hf_trainer(hf, tmp_path)
    trainer.train()
    assert xrt_torch.get_kernel_policy() is None
    run = callback.run
    assert (run.step, len(run.unmatched)) == (4, 1)
    (row,) = (row for row in run.evidence.rows if (row.module, row.op, row.phase) == ("first", "matmul", "train"))
    assert row.count == 2  # accumulated
    (logged,) = (one for one in trainer.state.log_history if "xpuruntime/covered" in one)
    assert (logged["step"], logged["xpuruntime/covered"]) == (2, run.metrics["covered"])
    for step in (2, 4):
        assert xrt.load_lock(tmp_path / f"checkpoint-{step}" / LOCK_FILE).digest == run.lock.digest
    again, callback = hf_trainer(hf, tmp_path, steps=6)
    again.train(resume_from_checkpoint=True)
    assert (callback.run.step, callback.run.lock.digest) == (2, run.lock.digest)
    changed, _ = hf_trainer(hf, tmp_path, steps=8, policy={"kernels": {"matmul": "torch"}})
    with pytest.raises(xrt.LockError, match="another policy"):
        changed.train(resume_from_checkpoint=True)


def test_transformers_that_break_off_leave_no_policy(hf: Any, tmp_path: Path) -> None:
    for at in (1, 3):  # inside of the explained step, and after it
        trainer, _ = hf_trainer(hf, tmp_path, stop_at=at)
        with pytest.raises(Stop):
            trainer.train()
        assert xrt_torch.get_kernel_policy() is None
        with xrt_torch.explain():
            pass


def test_transformers_take_the_callback_in_the_constructor_alone(hf: Any, tmp_path: Path) -> None:
    from xpuruntime.integrations.transformers import PolicyCallback

    trainer, _ = hf_trainer(hf, tmp_path)
    trainer.add_callback(PolicyCallback(POLICY))
    with pytest.raises(xrt.InputError, match="Fix: give it to the constructor"):
        trainer.train()
    assert xrt_torch.get_kernel_policy() is None


# --- Lightning -------------------------------------------------------------------------------------------------------


@pytest.fixture
def fit(tmp_path: Path) -> Callable[..., tuple[Any, Any]]:
    pl = pytest.importorskip("lightning.pytorch", reason="pip install lightning")
    from xpuruntime.integrations.lightning import PolicyCallback

    class Module(pl.LightningModule):
        def __init__(self, stop_at: int | None) -> None:
            super().__init__()
            self.first, self.last, self.stop_at = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4), stop_at

        def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
            if number == self.stop_at:
                raise ValueError("stop")
            return self.last(torch.relu(self.first(batch))).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    def call(
        steps: int = 4, *, policy: Any = POLICY, stop_at: int | None = None, resume: Path | None = None
    ) -> tuple[Any, Any]:
        callback = PolicyCallback(policy)
        trainer = pl.Trainer(
            max_steps=steps, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
            accumulate_grad_batches=2, callbacks=[callback], default_root_dir=tmp_path,
        )  # fmt: skip
        data = torch.utils.data.DataLoader(torch.cat(batches(8)), batch_size=2)
        trainer.fit(Module(stop_at), data, ckpt_path=resume)
        return trainer, callback.run

    return call


def test_lightning(fit: Callable[..., tuple[Any, Any]], tmp_path: Path) -> None:
    trainer, run = fit()
    assert xrt_torch.get_kernel_policy() is None
    assert (run.step, len(run.unmatched), modules_of(run.lock)) == (4, 1, {"first", "last"})
    assert trainer.callback_metrics["xpuruntime/covered"] == pytest.approx(run.metrics["covered"])
    path = tmp_path / "here.ckpt"
    trainer.save_checkpoint(path)
    _, again = fit(8, resume=path)
    assert again.lock.digest == run.lock.digest
    with pytest.raises(xrt.LockError, match="another policy"):
        fit(12, resume=path, policy={"kernels": {"matmul": "torch"}})
    assert xrt_torch.get_kernel_policy() is None


@pytest.mark.parametrize("stop_at", [3, 6])
def test_lightning_that_breaks_off_leaves_no_policy(fit: Callable[..., tuple[Any, Any]], stop_at: int) -> None:
    with pytest.raises(ValueError, match="stop"):
        fit(stop_at=stop_at)
    assert xrt_torch.get_kernel_policy() is None
    with xrt_torch.explain():
        pass


# --- accelerate ------------------------------------------------------------------------------------------------------


@pytest.fixture
def accelerate() -> Any:
    found = pytest.importorskip("accelerate", reason="pip install accelerate")
    yield found
    found.state.AcceleratorState._reset_state(reset_partial_state=True)
    found.state.GradientState._reset_state()


def accelerated(accelerate: Any, folder: Path, *, load: bool = False, policy: Any = POLICY) -> Any:
    from xpuruntime.integrations.accelerate import training_policy

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = Net()
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01))
    with training_policy(accelerator, net, policy) as run:
        if load:
            accelerator.load_state(str(folder))
        for batch in batches(6):
            with accelerator.accumulate(net):
                accelerator.backward(net(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        if not load:
            accelerator.save_state(str(folder))
    return run


def test_accelerate(accelerate: Any, tmp_path: Path) -> None:
    run = accelerated(accelerate, tmp_path)
    assert xrt_torch.get_kernel_policy() is None
    assert (run.step, modules_of(run.lock)) == (3, {"first", "last"})
    assert xrt.load_lock(tmp_path / LOCK_FILE).digest == run.lock.digest
    again = accelerated(accelerate, tmp_path, load=True)
    assert again.lock.digest == run.lock.digest
    with pytest.raises(xrt.LockError, match="another policy"):
        accelerated(accelerate, tmp_path, load=True, policy={"kernels": {"matmul": "torch"}})
    assert xrt_torch.get_kernel_policy() is None


# --- Ray Train -------------------------------------------------------------------------------------------------------


def work(config: dict[str, Any]) -> None:
    import ray.train

    from xpuruntime.integrations.ray import training_policy

    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with training_policy(net, POLICY) as run:
        for batch in batches(2):
            uneven_step(net, ray.train.get_context().get_world_rank(), batch).backward()
            optimizer.step()
    folder = Path(config["folder"], str(ray.train.get_context().get_world_rank()))
    folder.mkdir()
    run.save(folder)
    (folder / "differences.json").write_text(json.dumps(run.rank_differences))
    ray.train.report(run.metrics)


@pytest.mark.slow
def test_ray_train(tmp_path: Path) -> None:
    ray = pytest.importorskip("ray", reason="pip install 'ray[train]'")
    pytest.importorskip("ray.train.torch", reason="pip install 'ray[train]'", exc_type=ImportError)
    folders = [str(Path(__file__).parent), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join(folders), "RAY_TRAIN_V2_ENABLED": "1"}}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    try:
        trainer = ray.train.torch.TorchTrainer(
            work,
            train_loop_config={"folder": str(tmp_path)},
            scaling_config=ray.train.ScalingConfig(num_workers=2),
            torch_config=ray.train.torch.TorchConfig(backend="gloo"),
            run_config=ray.train.RunConfig(storage_path=str(tmp_path / "ray")),
        )
        trainer.fit()
    finally:
        ray.shutdown()
    for rank in ("0", "1"):
        differences = json.loads((tmp_path / rank / "differences.json").read_text())
        assert any("rank 1 ran" in one and "fp64" in one for one in differences)
    locks = [xrt.load_lock(tmp_path / rank / LOCK_FILE) for rank in ("0", "1")]
    assert modules_of(locks[0]) >= {"first", "last"}
    assert locks[0].digest != locks[1].digest


# --- missing packages ------------------------------------------------------------------------------------------------


def test_a_missing_framework_is_refused_with_the_command_that_installs_it() -> None:
    code = """
import importlib, sys
sys.modules.update(dict.fromkeys(("lightning", "pytorch_lightning", "ray", "transformers")))
for name in ("lightning", "ray", "transformers"):
    try:
        importlib.import_module(f"xpuruntime.integrations.{name}")
    except ImportError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    commands = [line.rpartition("Fix: ")[2] for line in done.stdout.splitlines()]
    assert commands == ["`pip install lightning`", "`pip install 'ray[train]'`", "`pip install 'transformers[torch]'`"]
