# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`build_report`: one report of the plan, what ran, and the environment."""

from __future__ import annotations

import os
import platform
import shlex
import statistics
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from xpuruntime.evidence.key_observations import observations
from xpuruntime.evidence.report import Report
from xpuruntime.files.paths import json_bytes
from xpuruntime.runtime.packages import installed

if TYPE_CHECKING:
    from xpuruntime.evidence.cuda_graphs import GraphStatus
    from xpuruntime.evidence.determinism import DeterminismTests
    from xpuruntime.evidence.memory_over_time import MemorySample
    from xpuruntime.evidence.records import Boundary, Control, Conversion, Latency, SourceNode, Unit
    from xpuruntime.evidence.shape_coverage import ShapeCoverage
    from xpuruntime.runtime.machine import Library, Machine


class Seen(Protocol):
    """What an engine's instrumented run returns; `xpuruntime.engines.base.Observed` is one."""

    @property
    def units(self) -> tuple[Unit, ...]: ...  # noqa: D102
    @property
    def boundaries(self) -> tuple[Boundary, ...]: ...  # noqa: D102
    @property
    def effective(self) -> dict[str, str]: ...  # noqa: D102
    @property
    def notes(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def partial(self) -> bool: ...  # noqa: D102


def build_report(
    plan: Mapping[str, Any],
    controls: Sequence[Control],
    observed: Seen,
    *,
    engine: str | None = None,
    device: str | None = None,
    precision: str | None = None,
    allow_cpu_ops: Collection[str] = (),
    conversions: Iterable[Conversion] = (),
    latency: Latency | None = None,
    memory: Mapping[str, int] | None = None,
    libraries: Iterable[Library] = (),
    notes: Iterable[str] = (),
    command: str | None = None,
    environment: Mapping[str, Any] | None = None,
    graph: Iterable[SourceNode] = (),
    memory_over_time: Iterable[MemorySample] = (),
    cuda_graph: GraphStatus | None = None,
    shapes: ShapeCoverage | None = None,
    determinism: DeterminismTests | None = None,
) -> Report:
    """Compare the plan with what was observed, and gather the rest."""

    def resolved(stated: str | None, name: str) -> str | None:
        value = plan.get(name)
        return stated if stated is not None else value if isinstance(value, str) and value else None

    return Report(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=_command() if command is None else command,
        plan=_plain(dict(plan)),
        observations=observations(
            controls,
            observed.effective,
            observed.units,
            engine=resolved(engine, "engine"),
            device=resolved(device, "device"),
            precision=resolved(precision, "precision"),
            allow_cpu_ops=allow_cpu_ops,
            keys=getattr(observed, "keys", None),
        ),
        units=observed.units,
        boundaries=observed.boundaries,
        conversions=tuple(conversions),
        latency=msgspec.structs.replace(latency, detail=_plain(latency.detail)) if latency is not None else None,
        memory=dict(memory or {}),
        environment=_plain(dict(environment) if environment is not None else environment_facts()),
        libraries=tuple(libraries),
        notes=(*observed.notes, *notes),
        partial=observed.partial,
        graph=tuple(graph),
        decisions=getattr(observed, "decisions", ()),
        memory_over_time=tuple(memory_over_time),
        live=getattr(observed, "live", ()),
        timeline=getattr(observed, "timeline", None),
        cuda_graph=cuda_graph,
        shapes=shapes,
        determinism=determinism,
    )


def _command() -> str:
    name = Path(sys.argv[0]).name
    return shlex.join([name, *sys.argv[1:]] if name in ("xrt", "xpuruntime") else sys.orig_argv)


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.json.decode(json_bytes(value))
    return plain


#: The units explain a run when their sum is within this share of it.
_NEAR = 0.10


def instrumented(
    run_us: Sequence[float],
    units_us: Sequence[float],
    units: int,
    *,
    outside_us: Mapping[str, float] | None = None,
    cut_us: float = 0.0,
) -> dict[str, Any]:
    """Return the wall time of the instrumented runs, and which share of it the units explain."""
    if not run_us:
        return {}
    known = bool(units_us) and units > 0 and min(run_us) > 0
    single = len(units_us) == len(run_us)
    middle = statistics.fmean if known and not single else statistics.median
    results: dict[str, Any] = {
        "run_us": float(middle(run_us)),
        "runs": len(run_us),
        "statistic": "mean" if known and not single else "median",
    }
    if known:
        results |= {"units_us": float(middle(units_us)), "units": units}
        shares = [inside / run for inside, run in zip(units_us, run_us, strict=False)]
        results["coverage"] = float(statistics.median(shares)) if single else results["units_us"] / results["run_us"]
        rests = [run - inside for inside, run in zip(units_us, run_us, strict=False)]
        rest = statistics.median(rests) if single else results["run_us"] - results["units_us"]
        results["outside_us"] = float(max(0.0, rest))
        if outside_us:
            results["outside"] = dict(outside_us)
        if cut_us:
            results["cut_us"] = float(cut_us)
    return results


def coverage_note(detail: Mapping[str, Any]) -> str | None:
    """Return a sentence where the units explain less than 90 % of the instrumented runs, or more than 110 %."""
    share = detail.get("coverage")
    if share is None or abs(share - 1) <= _NEAR:
        return None
    units, run, count = detail["units_us"], detail["run_us"], detail["units"]
    head = (
        f"the units explain {share:.0%} of an instrumented run, {units:,.1f} of {run:,.1f} us ({detail['statistic']})"
    )
    if share > 1:
        return f"{head}: units that run side by side count each for itself"
    measured = detail.get("outside", {})
    parts = [f"{measured['call']:,.1f} us is the call itself"] if "call" in measured else []
    if "between" in measured:
        parts.append(
            f"{measured['between']:,.1f} us passes between units, {measured['between'] / count:,.1f} for each of "
            f"{count}, in dispatch and the profiler's own work"
        )
    if "cut_us" in detail:
        parts.append(f"up to {detail['cut_us']:,.1f} us is cut off, because the engine counts whole microseconds")
    if parts:
        return f"{head}: outside of them, {'; '.join(parts)}; the rest is whatever else engine and machine did"
    between = max(0.0, run - units) / count
    return (
        f"{head}: the rest passes between units, {between:,.1f} us for each of {count}, in dispatch, the profiler's "
        "own work, the call itself, and whatever else the machine did"
    )


def profiler_overhead_note(figures: Mapping[str, Any], unwatched_us: float) -> str | None:
    """Return a sentence where the units together took longer than whole uninstrumented runs."""
    units = figures.get("units_us", 0.0)
    if units <= unwatched_us * (1 + _NEAR):
        return None
    return (
        f"the units together took {units:,.1f} us of an instrumented run, and nine of ten whole runs of the session "
        f"at most {unwatched_us:,.1f}: times of units hold work of the profiler, or the machine was busy. Read them as "
        "shares"
    )


_PACKAGES = (
    "xpuruntime",
    "numpy",
    "onnx",
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxruntime-qnn",
    "openvino",
    "tensorrt-cu13",
    "tensorrt-cu12",
    "torch",
    "cupy-cuda13x",
    "cupy-cuda12x",
    "nvidia-cublas",
    "nvidia-cuda-runtime",
    "nvidia-cudnn-cu13",
)
_PREFIXES = (
    "CUBLAS",
    "CUDA_",
    "CUDNN_",
    "GOMP_",
    "HIP_",
    "KMP_",
    "MKL_",
    "MLAS_",
    "NCCL_",
    "NVIDIA_",
    "OMP_",
    "ONNX",
    "OPENBLAS_",
    "OPENVINO_",
    "ORT_",
    "OV_",
    "PYTORCH_",
    "QNN_",
    "ROCR_",
    "TENSORRT_",
    "TORCH_",
    "TRT_",
    "XPURUNTIME_",
)
_NAMES = frozenset({"GLIBC_TUNABLES", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONHASHSEED"})
_PRIVATE = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL", "AUTH")


def influential_variables(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment variables that engines and vendor libraries read, sorted; never one that looks secret."""
    source = os.environ if variables is None else variables
    return {
        name: source[name]
        for name in sorted(source)
        if (name.startswith(_PREFIXES) or name in _NAMES) and not any(word in name.upper() for word in _PRIVATE)
    }


def environment_facts() -> dict[str, Any]:
    """Return ``python``, ``platform``, ``machine``, ``packages``, ``variables``. None of the packages is imported."""
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": platform.platform(),
        "machine": platform.machine(),
        "packages": installed(*_PACKAGES),
        "variables": influential_variables(),
    }


def machine_facts(machine: Machine) -> dict[str, Any]:
    """Return ``cpu``, and where there are NVIDIA devices ``driver`` and ``devices``."""
    facts: dict[str, Any] = {"cpu": f"{machine.cpu.name}, {machine.cpu.cores} cores"}
    if machine.cuda:
        facts["driver"] = "CUDA " + _version(machine.cuda[0].driver_version)
        facts["devices"] = {
            f"cuda:{gpu.index}": f"{gpu.name}, sm{_version(gpu.compute_capability).replace('.', '')}, "
            f"{gpu.total_memory} bytes"
            for gpu in machine.cuda
        }
    return facts


def _version(pair: tuple[int, int]) -> str:
    return f"{pair[0]}.{pair[1]}"
