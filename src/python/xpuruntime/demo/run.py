# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The files of the demo."""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from xpuruntime.errors import InputError
from xpuruntime.evidence.records import Latency
from xpuruntime.files.paths import json_text

if TYPE_CHECKING:
    from os import PathLike

    from numpy.typing import NDArray
    from rich.console import Console

    from xpuruntime.inference import InferenceSession
    from xpuruntime.lockfile.records import Lock
    from xpuruntime.policies import Policy

_FOLDER = Path(__file__).resolve().parent
_POLICY = """\
schema: xpuruntime.policy/1
mode: strict # refuse what cannot be enforced
execution: { engine: onnxruntime, device: cpu, precision: fp32, fallback: error }
"""


def demo_model_path() -> Path:
    """Return the path of the shipped model.

    Returns
    -------
    pathlib.Path
        An ONNX file, opset 17. Input ``image``: float32 [N, 1, 8, 8], values 0..1. Output ``logits``: float32 [N, 10].
    """
    return _FOLDER / "digits.onnx"


def demo_images() -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Return the held-out images and their labels.

    The model was never trained on these images, nor were they used to choose when to stop.

    Returns
    -------
    images : numpy.ndarray
        float32 [360, 1, 8, 8], values 0..1, ready to be the model's input ``image``.
    labels : numpy.ndarray
        uint8 [360], values 0..9.
    """
    with np.load(_FOLDER / "digits_test.npz") as held_out:
        images: NDArray[np.float32] = held_out["images"].astype(np.float32)[:, None] / np.float32(16)
        labels: NDArray[np.uint8] = held_out["labels"]
    return images, labels


def write_demo_files(folder: str | PathLike[str]) -> list[Path]:
    """Write the files that the commands of the documentation name.

    Returns
    -------
    list of pathlib.Path
        ``model.onnx``, the shipped model; ``retrained.onnx``, the same graph with other weights; ``policy.yaml``.

    Raises
    ------
    InputError
        A file of that name is there.
    """
    import onnx
    from onnx import numpy_helper

    paths = [Path(folder) / name for name in ("model.onnx", "retrained.onnx", "policy.yaml")]
    for path in paths:
        if path.exists():
            raise InputError(f"{path} exists, and is not overwritten. Fix: xrt demo --files new-folder")
    Path(folder).mkdir(parents=True, exist_ok=True)
    retrained = onnx.load(_FOLDER / "digits.onnx")
    weight = retrained.graph.initializer[0]
    values = (numpy_helper.to_array(weight) * 1.01).astype(np.float32)
    weight.CopyFrom(numpy_helper.from_array(values, weight.name))
    shutil.copy(_FOLDER / "digits.onnx", paths[0])
    onnx.save(retrained, paths[1])
    paths[2].write_text(_POLICY, encoding="utf-8")
    return paths


#: What the model must reach on the held-out images, whatever the engine, device and precision.
REQUIRED_ACCURACY = 0.98
_CHUNK = 60
_BATCHES = (1, 64)
_WARM_UP, _RUNS = 20, 200


class DemoResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the demo."""

    schema: str = "xpuruntime.demo/1"
    plan: dict[str, Any]
    images: int
    correct: int
    accuracy: float
    accurate: bool
    latency: dict[str, Latency]
    honoured: bool
    report: dict[str, Any]
    lock: str
    verified: bool
    verification: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists, strings and numbers."""
        result: dict[str, Any] = msgspec.to_builtins(self)
        return result

    def to_json(self) -> str:
        """Return the result as indented JSON."""
        return json_text(self)


def run_demo(
    device: str | None = None,
    policy: Policy | str | PathLike[str] | dict[str, Any] | None = None,
    console: Console | None = None,
    files: str | PathLike[str] | None = None,
) -> DemoResult:
    """Run the shipped digits model on its held-out images: plan, accuracy, latency, evidence, lock, verification.

    What is printed fits one screen; the result has all of it. `files` is a folder for `write_demo_files`.
    """
    from rich.console import Console
    from rich.markup import escape

    from xpuruntime.files.scratch import ScratchFolder
    from xpuruntime.inference import InferenceSession
    from xpuruntime.locks.relock import lock
    from xpuruntime.locks.verification.metrics import Metric
    from xpuruntime.locks.verification.verify import verify

    console = console or Console(quiet=True, force_jupyter=False)
    images, labels = demo_images()
    written = [] if files is None else write_demo_files(files)

    def tell(part: str, text: str) -> None:
        console.print(f"[bold]{part:14}[/]{text}", soft_wrap=True)

    with InferenceSession(demo_model_path(), device=device, policy=policy) as session:
        plan = session.plan
        tell("Plan", f"{plan.candidate} {plan.engine_version or ''}, precision {plan.precision}, mode {plan.mode}")

        predicted = _predict(session.run, images)
        correct = int((predicted == labels).sum())
        accuracy = correct / len(labels)
        accurate = accuracy >= REQUIRED_ACCURACY
        _show_images(console, images, labels, predicted)
        mark = "[green]as shipped[/]" if accurate else f"[red]below the required {REQUIRED_ACCURACY:.0%}[/]"
        tell("Accuracy", f"{correct} of {len(labels)} held-out images recognized: {accuracy:.2%}, {mark}")

        latency = {str(batch): _time(session, images[:batch]) for batch in _BATCHES}
        tell("Latency", f"{_latency_line(latency)} (wall time, median of {_RUNS} runs)")

        report = session.explain({"image": images[: max(_BATCHES)]})
        tell("Evidence", report.headline)
        for seen in report.observations:
            tell("", escape(f"{seen.key}: requested {seen.requested}, observed {seen.observed}: {seen.status}"))

    example = {"image": images[:1]}
    with ScratchFolder("demo") as folder:
        path = Path(folder) / "digits.lock"
        locked = lock(demo_model_path(), policy, path, device=device, inputs=example, command="xrt demo").lock
        tell("Lock", _lock_line(locked))
        verification = verify(
            demo_model_path(),
            policy,
            device=device,
            lock=path,
            inputs=example,
            only=["evidence", "accuracy", "audit"],
            metrics=[Metric("recognised", lambda run: (_predict(run, images) == labels).mean(), REQUIRED_ACCURACY)],
        )
    tell("Verification", verification.headline)
    for claim in verification.of("fail"):
        tell("", escape(f"{claim.id}: {claim.reason}"))
    command, model = escape(_command()), escape(str(written[0] if written else demo_model_path()))
    if written:
        tell("Files", escape(", ".join(map(str, written))))
    tell("Next", f"{command} explain {model} --html report.html")
    tell("", f"{command} doctor")
    return DemoResult(
        plan=plan.to_dict(),
        images=len(labels),
        correct=correct,
        accuracy=accuracy,
        accurate=accurate,
        latency=latency,
        honoured=report.honoured,
        report=report.to_dict(),
        lock=locked.digest,
        verified=verification.verdict != "fail",
        verification=verification.to_dict(),
    )


def _command() -> str:
    beside = Path(sys.executable).with_name("xrt")
    if shutil.which("xrt") is not None or not beside.is_file():
        return "xrt"
    return shlex.quote(str(beside.relative_to(Path.cwd()) if beside.is_relative_to(Path.cwd()) else beside))


def _lock_line(locked: Lock) -> str:
    facts = len(locked.identity.validators)
    return f"{locked.identity.counts}; {facts} facts of libraries and machine; {locked.digest[:19]}"


def _predict(run: Callable[..., dict[str, Any]], images: NDArray[np.float32]) -> NDArray[np.int64]:
    parts = [run({"image": images[i : i + _CHUNK]})["logits"] for i in range(0, len(images), _CHUNK)]
    digits: NDArray[np.int64] = np.concatenate(parts).argmax(axis=1)
    return digits


def _time(session: InferenceSession, batch: NDArray[np.float32]) -> Latency:
    feeds = {"image": batch}
    for _ in range(_WARM_UP):
        session.run(feeds)
    samples = np.empty(_RUNS)
    for i in range(_RUNS):
        start = time.perf_counter_ns()
        session.run(feeds)
        samples[i] = (time.perf_counter_ns() - start) / 1e3
    return Latency(
        median_us=float(np.median(samples)),
        p90_us=float(np.percentile(samples, 90)),
        min_us=float(samples.min()),
        runs=_RUNS,
        detail={"batch": len(batch), "call": "InferenceSession.run", "arrays": "numpy in, numpy out"},
    )


def _show_images(
    console: Console, images: NDArray[np.float32], labels: NDArray[np.uint8], predicted: NDArray[np.int64]
) -> None:
    from rich.columns import Columns
    from rich.panel import Panel

    order = np.argsort(predicted == labels, kind="stable")[:3]
    panels = []
    for i in order:
        rows = ("".join(" ░▒▓█"[round(float(v) * 4)] * 2 for v in row) for row in images[i, 0])
        right = predicted[i] == labels[i]
        title = f"read as {predicted[i]}, {'right' if right else f'is {labels[i]}'}"
        panels.append(Panel("\n".join(rows), title=title, border_style="green" if right else "red", expand=False))
    console.print(Columns(panels))


def _latency_line(latency: dict[str, Latency]) -> str:
    return ", ".join(f"batch {batch} in {row.median_us:,.1f} us" for batch, row in latency.items())
