# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Searches on CUDA devices: energy by NVML's counter, and two devices at once."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import xpuruntime as xrt
from xpuruntime.measuring.conditions import moment, open_meter
from xpuruntime.measuring.statistics import CandidateCode

torch = pytest.importorskip("torch")

POLICY = {"execution": {"engine": "onnxruntime", "device": "cuda:0"}}
#: Two candidates beside the policy given, which a plan takes: no key of a policy sets this option.
OPTIONS = {"onnxruntime": {"arena_extend_strategy": ["kNextPowerOfTwo", "kSameAsRequested"]}}
SPEC = {
    "space": {"options": OPTIONS, "kernels": "off", "cuda_graph": ["off"], "layout": ["auto"]},
    "decide": {"min_effect": "20%", "confidence": 0.6, "rounds": [3, 5]},
}  # fmt: skip


def told(found: xrt.TuneResult) -> str:
    """Return what a search found, with the code, the reason and the figure of every candidate."""
    return "\n".join([str(found), *map(str, found.candidates), *found.notes])


@pytest.mark.alone
def test_a_busy_device_uses_more_energy_than_an_idle_one() -> None:
    meter = open_meter("cuda:0")
    left = torch.randn(4096, 4096, device="cuda:0")

    def joules(*, busy: bool) -> float:
        torch.cuda.synchronize()
        before, until = meter.read(), time.monotonic() + 1.0
        while time.monotonic() < until:
            if busy:
                left @ left
                torch.cuda.synchronize()
            else:
                time.sleep(0.05)
        return meter.joules(before, meter.read())

    idle, busy = joules(busy=False), joules(busy=True)
    assert 0 < idle < busy < 5000


def test_the_clock_is_that_of_the_device() -> None:
    clocks = {gpu.index: gpu for gpu in moment().gpus}
    assert 0 in clocks
    assert 0 < clocks[0].sm_mhz <= clocks[0].max_sm_mhz


@pytest.mark.alone
def test_a_search_for_energy(wide: Path) -> None:
    found = xrt.tune(wide, POLICY, inputs="random", objective="energy", spec=SPEC)
    assert found.stages["raced"] >= 2, told(found)
    for candidate in found.candidates:
        if candidate.code is not CandidateCode.DUPLICATE:
            assert candidate.figure is not None, told(found)
            assert 0 < candidate.figure < 1.0, f"joules of a run of a small model\n{told(found)}"


@pytest.mark.cuda_onnxruntime
def test_a_search_of_bound_runs_finds_graphs(wide: Path, tmp_path: Path) -> None:
    space = {**SPEC["space"], "options": {"onnxruntime": {}}, "cuda_graph": ["off", "require"]}
    spec = {**SPEC, "space": space}
    found = xrt.tune(wide, POLICY, inputs="random", spec=spec, journal=tmp_path / "j")
    assert found.call == "bind", told(found)
    assert any("CUDA graphs are asked for" in note for note in found.notes)
    graphs = {
        candidate.changes.get("execution.cuda_graph", "off"): candidate.cuda_graph
        for candidate in found.candidates
        if candidate.figure
    }
    assert graphs == {"off": "off", "require": "captured"}, told(found)
    assert all(
        candidate.error is not None and candidate.error < 1e-2
        for candidate in found.candidates
        if candidate.figure is not None
    )
    plain = xrt.tune(wide, POLICY, inputs="random", call="run", spec=SPEC)
    assert {candidate.cuda_graph for candidate in plain.candidates} == {None}


@pytest.mark.skipif(xrt.get_device_count("cuda") < 2, reason="needs two CUDA devices")
def test_a_search_on_two_devices(wide: Path, tmp_path: Path) -> None:
    devices = ["cuda:0", "cuda:1"]
    found = xrt.tune(wide, POLICY, inputs="random", spec=SPEC, devices=devices, journal=tmp_path / "j")
    assert {candidate.device for candidate in found.candidates if candidate.figure is not None} == set(devices), told(
        found
    )
    assert {candidate.device for candidate in found.candidates if candidate.device} >= set(devices)
    assert found.devices == tuple(devices)
