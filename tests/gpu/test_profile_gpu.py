# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Profiles of devices: by CUPTI without PyTorch, by PyTorch's profiler beside it, by events where both are taken."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import xpuruntime as xrt
from xpuruntime.testing import models

torch = pytest.importorskip("torch")

if TYPE_CHECKING:
    from xpuruntime.evidence import Report


def program(name: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("profiled_program.py")), name],
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def of(found: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [one for one in found["work"] if one["kind"] == kind]


def test_cupti_sees_kernels_in_their_ranges_and_copies_with_their_bytes() -> None:
    found = program("alone")
    assert found["source"] == "cupti", found["notes"]
    assert found["dropped"] == 0
    products = [one for one in of(found, "kernel") if one["in"].startswith("matmul ")]
    assert len({product["range"] for product in products}) == 3, of(found, "kernel")
    start, end = found["span"]
    for one in found["work"]:
        assert start <= one["start_ns"] <= one["end_ns"] <= end, one
    copies = [one for one in of(found, "copy") if one["bytes"] == 4 << 20]
    ends = {(copy["source"].split(" ")[0], copy["destination"].split(" ")[0]) for copy in copies}
    assert ends == {("host", "device"), ("device", "host")}, copies
    assert all(copy["in"] == "copies" for copy in copies)
    assert any(one["name"].startswith("the host waits") for one in of(found, "wait"))
    launched = {call["correlation"] for call in found["calls"]}
    assert all(product["correlation"] in launched for product in products)


def test_cupti_is_given_back_so_that_pytorch_profiles_afterwards() -> None:
    found = program("twice_and_then_torch")
    assert found["source"] == "cupti", found["notes"]
    assert len(of(found, "kernel")) >= 1
    assert found["torch kernels"], "PyTorch's profiler is blind after ours"
    assert found["beside"]["source"] == "kineto", found["beside"]["notes"]
    assert of(found["beside"], "kernel")


def test_records_beyond_the_limit_are_counted() -> None:
    found = program("limited")
    assert len(found["work"]) == 4
    assert len(found["ranges"]) == 4
    assert found["dropped"] >= 32
    assert any("lost" in note for note in found["notes"])


def test_work_of_a_graph_says_so() -> None:
    found = program("graph")
    assert any(one["graph"] for one in of(found, "kernel")), found["work"]
    assert any("GraphLaunch" in call["name"] for call in found["calls"])


def test_copies_say_what_memory_they_read_and_write_and_allocations_their_bytes() -> None:
    found = program("memory")
    copies = {one["in"]: (one["source"], one["destination"], one["bytes"]) for one in of(found, "copy")}
    assert copies == {
        "pageable": ("host (pageable)", "device", 4 << 18),
        "pinned": ("device", "host (pinned)", 4 << 19),
    }
    for kind in ("allocation", "release"):
        made = [one for one in of(found, kind) if one["in"] == "allocates"]
        assert [(one["bytes"], one["destination"]) for one in made] == [(3 << 20, "device")], (kind, found["work"])


@pytest.mark.skipif(shutil.which("ncu") is None, reason="needs Nsight Compute on the PATH")
def test_nsight_compute_finds_a_range_and_keeps_cupti() -> None:
    done = subprocess.run(
        ["ncu", "--clock-control", "none", "--nvtx", "--nvtx-include", "the one to look at/", "--csv", "--section",
         "LaunchStats", sys.executable, str(Path(__file__).with_name("profiled_program.py")), "watched_by_ncu"],
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    document = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"source"')))
    # It takes CUPTI's place: the profile says so and times xpuruntime kernels by events.
    assert document["source"] == "events", document["notes"]
    assert any("Nsight Compute" in note for note in document["notes"])
    rows = list(csv.DictReader(line for line in done.stdout.splitlines() if line.startswith('"')))
    launches = [row for row in rows if row.get("ID", "").isdigit()]
    assert launches, done.stdout[-3000:]
    for row in launches:
        text = " ".join(str(value) for value in row.values())
        assert "the one to look at" in text, row
        assert "matmul " in text, row


def test_beside_pytorch_its_profiler_is_the_source() -> None:
    x = torch.randn(512, 512, device="cuda")
    xrt.ops.matmul(x, x)
    with xrt.profile() as prof:
        xrt.ops.matmul(x, x)
        torch.relu(x)
        x.cpu()
    result = prof.result
    assert result.source == "kineto", result.notes
    named = {range_.id: range_ for range_ in result.ranges}
    products = [one for one in result.work if one.range and named[one.range].name.startswith("matmul ")]
    assert products, result.shares()
    assert any(range_.category == "torch" and "relu" in range_.name for range_ in result.ranges)
    assert any(one.kind == "copy" and one.bytes == x.numel() * 4 for one in result.work)


def test_where_pytorchs_profiler_runs_kernels_of_ours_are_timed_by_events() -> None:
    x = torch.randn(2048, 2048, device="cuda")
    xrt.ops.matmul(x, x)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities), xrt.profile() as prof:
        for _ in range(3):
            xrt.ops.matmul(x, x)
    result = prof.result
    assert result.source == "events", result.notes
    assert any("one runs already" in note for note in result.notes)
    assert [one.name.split(" ")[0] for one in result.work] == ["matmul"] * 3
    # 17.2 GFLOP: no device does it in less than 5 us, and none of today's needs 50 ms.
    assert all(5 < one.us < 50_000 for one in result.work)


def test_a_trace_of_the_device_opens(tmp_path: Path) -> None:
    x = torch.randn(512, 512, device="cuda")
    xrt.ops.matmul(x, x)
    with xrt.profile(tmp_path / "trace.json") as prof:
        xrt.ops.matmul(x, x)
    trace = json.loads((tmp_path / "trace.json").read_text())
    kernels = [
        traceevent
        for traceevent in trace["traceEvents"]
        if traceevent.get("cat") == "kernel" and traceevent["pid"] == 1_000_000_000
    ]
    assert len(kernels) == sum(one.kind == "kernel" for one in prof.result.work)
    flows = {traceevent["id"] for traceevent in trace["traceEvents"] if traceevent["ph"] == "s"}
    assert flows <= {traceevent["id"] for traceevent in trace["traceEvents"] if traceevent["ph"] == "f"}


@pytest.fixture
def heavy(tmp_path: Path) -> Path:
    return models.save(models.mlp(width=1024), tmp_path)


def explained(path: Path, **options: Any) -> Report:
    x = np.random.default_rng(0).standard_normal((256, 1024)).astype(np.float32)
    with xrt.InferenceSession(path, device="cuda:0", engine="onnxruntime", **options) as session:
        return session.explain({"x": x})


def products(report: Report) -> list[Any]:
    return [
        kernel
        for unit in report.units
        for kernel in unit.device_kernels
        if kernel.kind == "kernel" and kernel.precision is not None
    ]


@pytest.mark.parametrize(
    ("precision", "wanted", "tensor_cores"), [("fp32", "fp32", False), ("tf32", "tf32", True), ("fp16", "fp16", True)]
)
@pytest.mark.cuda_onnxruntime
def test_a_product_shows_the_kernel_that_ran(heavy: Path, precision: str, wanted: str, tensor_cores: bool) -> None:
    report = explained(heavy, precision=precision)
    found = products(report)
    assert found, [(unit.id, unit.device_kernels) for unit in report.units]
    assert {one.precision for one in found} == {wanted}, found
    assert {one.tensor_cores for one in found} == {tensor_cores}, found
    hot = [unit for unit in report.units if unit.device_kernels and unit.time is not None]
    assert all(unit.time.kind == "device" for unit in hot)
    assert not report.partial, report.notes


@pytest.mark.cuda_onnxruntime
def test_units_have_the_time_of_the_device(heavy: Path) -> None:
    report = explained(heavy, precision="fp32")
    [note] = [note for note in report.notes if "of device time in a run" in note]
    copies = sum(b.time.value for b in report.boundaries if b.kind == "copy" and b.time is not None)
    units = sum(u.time.value for u in report.units if u.time is not None and u.time.kind == "device")
    told = float(note.split(" us ")[0].split(" ")[-1])
    assert abs(units + copies - told) <= 0.1 * told, note
    assert any(b.kind == "copy" and "host" in b.where and b.bytes for b in report.boundaries), report.boundaries


@pytest.mark.cuda_onnxruntime
def test_a_profile_around_explain_is_said(heavy: Path) -> None:
    x = np.zeros((256, 1024), np.float32)
    with (
        xrt.InferenceSession(heavy, device="cuda:0", engine="onnxruntime") as session,
        xrt.profile() as prof,
    ):
        report = session.explain({"x": x})
    assert any("what the device did is not seen" in note for note in report.notes)
    assert any(mark.track == "nodes of ONNX Runtime" for mark in prof.result.marks)
    assert any(range_.category == "run" for range_ in prof.result.ranges)
