# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Searches on several devices: named, alike, one candidate on each, and decided as on one."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import machines
import msgspec
import pytest
from simulated_executor import SimulatedExecutor, run

import xpuruntime as xrt
from xpuruntime.engines.base import Tunable
from xpuruntime.errors import InputError, PolicyError, UnsupportedOperationError
from xpuruntime.files.journal import Journal
from xpuruntime.runtime.machine import CpuFacts, CudaFacts, Machine
from xpuruntime.runtime.snapshot import machine_snapshot
from xpuruntime.tuning.space import Space
from xpuruntime.tuning.spec.tune_spec import TuneSpec
from xpuruntime.tuning.trial import CandidateFailed, DeviceLost, trial_devices

if TYPE_CHECKING:
    from collections.abc import Collection

CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
two_cores = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores that this process may use")
QUICK = {"min_effect": "20%", "confidence": 0.6, "rounds": [3, 5]}
LAYOUTS = Tunable(key="execution.layout", values=("auto", *(f"l{index}" for index in range(20))))


def cuda(index: int, name: str = "NVIDIA H100", memory: int = 80 << 30) -> CudaFacts:
    return machines.gpu(index, name=name, total_memory=memory)


def machine(*devices: CudaFacts) -> Machine:
    return machines.machine(
        python="3.11",
        cpu=CpuFacts(name="x", cores=2),
        cuda=devices,
        cuda_reason=None if devices else "no NVIDIA driver",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("devices: [cpu:0-1, cpu:1]", r"tune:1:1: devices: cpu:0-1 and cpu:1 share core 1; a device has one candidate"),
        ("devices: [cpu:3-0]", r"tune:1:11: devices\[0\]: 'cpu:3-0' is not a set of cores. Fix: write cpu:0-3"),
        ("devices: [cpu:0-3+2]", r"has a core twice"),
        ("devices: ['cpu:']", r"'cpu:' is not a set of cores"),
        ("devices: [cpu, cpu:1]", r"'cpu' is all cores, and shares them"),
        ("devices: [cuda:0, cpu:1]", r"cpu and cuda are unlike devices"),
        ("devices: [cuda:0, cuda]", r"'cuda:0' is listed twice"),
        ("devices: [cud:0]", r"did you mean 'cuda:0'\?"),
        ("devices: [auto]", r"'auto' is not a device"),
        ("{devices: [cpu:0], ray: {}}", r"ray: contradicts devices"),
        ("{devices: [cpu:0], isolation: none}", r"isolation: contradicts devices"),
    ],
)
def test_bad_devices_are_refused_with_the_place(text: str, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        TuneSpec.loads(text)


def test_names_have_one_form() -> None:
    spec = TuneSpec.loads("devices: [cpu:0-1+2-3+7, cpu:8]")
    assert spec.devices == ("cpu:0-3+7", "cpu:8")
    assert TuneSpec.coerce(spec.to_dict()) == spec
    assert TuneSpec(devices="cuda").devices == ("cuda:0",)


def test_devices_must_be_there_and_alike() -> None:
    here = machine(cuda(0), cuda(1), cuda(2, "NVIDIA A100"))
    devices = trial_devices(["cuda:0", "cuda:1"], "cuda:0", here)
    assert [one.device for one in devices] == ["cuda:0", "cuda:1"]
    assert devices[1].hardware["name"] == "NVIDIA H100"
    assert trial_devices([], "cuda:1", here)[0].name == "cuda:1"
    with pytest.raises(UnsupportedOperationError, match=r"cuda:2 is unlike cuda:0 \(name: NVIDIA H100 and NVIDIA A100"):
        trial_devices(["cuda:0", "cuda:2"], "cuda:0", here)
    with pytest.raises(UnsupportedOperationError, match=r"cuda:2 is unlike cuda:0"):
        trial_devices(["cuda:2"], "cuda:0", here)
    with pytest.raises(UnsupportedOperationError, match=r"cuda:5 was not found; CUDA devices: cuda:0, cuda:1, cuda:2"):
        trial_devices(["cuda:0", "cuda:5"], "cuda:0", here)
    with pytest.raises(UnsupportedOperationError, match=r"cuda:0 was not found; CUDA devices: no NVIDIA driver"):
        trial_devices(["cuda:0"], "cuda:0", machine())
    with pytest.raises(
        UnsupportedOperationError, match=r"the policy runs on cpu\. Fix: state execution.device: cuda:0"
    ):
        trial_devices(["cuda:0"], "cpu", here)


@two_cores
def test_sets_of_cores_must_be_there_and_of_one_size() -> None:
    here = machine_snapshot()
    first, second = CORES[:2]
    devices = trial_devices([f"cpu:{first}", f"cpu:{second}"], "cpu", here)
    assert [device.cores for device in devices] == [(first,), (second,)]
    assert devices[0].hardware["threads"] == 1
    with pytest.raises(UnsupportedOperationError, match=r"cpu:4095 has core 4095, and this process may use"):
        trial_devices(["cpu:4095"], "cpu", here)
    if len(CORES) > 2:
        with pytest.raises(UnsupportedOperationError, match=r"is unlike cpu:0 \("):
            trial_devices([f"cpu:{CORES[0]}", f"cpu:{CORES[1]}+{CORES[2]}"], "cpu", here)


# --- decisions -------------------------------------------------------------------------------------------------------


def seconds(changes) -> float:
    return 1e-3 / (1.3 if changes.get("execution.layout") == "l12" else 1.0)


def executors(count: int = 2, seed: int = 0, **more) -> list[SimulatedExecutor]:
    """Devices of different speed: a ratio between two of them would be wrong by a third and more."""
    return [
        SimulatedExecutor(
            lambda changes, scale=1 + index / 2: seconds(changes) * scale, seed=seed + index, device=f"d{index}", **more
        )
        for index in range(count)
    ]


SPACE = Space("cpu", {"a": (LAYOUTS,)}, ())


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_fastest_wins_on_any_number_of_devices(count: int, tmp_path: Path) -> None:
    several = executors(count)
    with Journal(tmp_path / "j", "tune_journal/2", {}) as journal:
        found = run(several, SPACE, journal=journal)
    assert found.verdict == "winner"
    winner = next(candidate for candidate in found.candidates if candidate.id == found.winner)
    assert winner.changes["execution.layout"] == "l12"
    assert found.gain is not None
    assert found.gain.low < 1.3 < found.gain.high
    lines = [json.loads(line) for line in (tmp_path / "j").read_bytes().splitlines()]
    assert {line["device"] for line in lines if line["key"].startswith("trial/")} == {
        one.device.name for one in several
    }
    assert {line["device"] for line in lines if line["key"].startswith("duel/")} == {"d0"}
    races = {}
    for one in lines:
        if one["key"].startswith("race/"):
            races.setdefault(one["key"].split("/")[1], set()).add(one["device"])
    assert all(len(devices) == 1 for devices in races.values()), "a race is of one device"
    assert {candidate.device for candidate in found.candidates if candidate.code not in ("duplicate",)} <= {
        one.device.name for one in several
    }


def test_two_devices_take_less_of_the_budget() -> None:
    one, two = executors(1), executors(2)
    run(one, SPACE)
    run(two, SPACE)
    assert max(executor.now for executor in two) < 0.75 * one[0].now


def test_a_search_on_two_devices_resumes_wherever_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with Journal(path, "tune_journal/2", {}) as journal:
        whole = run(executors(), SPACE, journal=journal)
    lines = path.read_bytes().splitlines(keepends=True)
    for kept in (1, 2, 5, 30, len(lines) // 2, len(lines) - 1):
        path.write_bytes(b"".join(lines[:kept]))
        several = executors(seed=50)
        with Journal(path, "tune_journal/2", {}, resume=True) as journal:
            found = run(several, SPACE, journal=journal)
        assert (found.verdict, found.winner) == (whole.verdict, whole.winner)
        assert [(candidate.id, candidate.changes, candidate.device) for candidate in found.candidates] == [
            (candidate.id, candidate.changes, candidate.device) for candidate in whole.candidates
        ]
        keys = [json.loads(line)["key"] for line in path.read_bytes().splitlines()]
        assert len(keys) == len(set(keys)), "nothing is measured twice"
        assert path.read_bytes().startswith(b"".join(lines[:kept]))


def test_a_failure_in_one_thread_ends_the_others() -> None:
    killed = threading.Event()

    class Broken(SimulatedExecutor):
        def turn(self, candidate):
            raise InputError("the disk is full")

    class Waits(SimulatedExecutor):
        def turn(self, candidate):
            assert killed.wait(20)
            raise CandidateFailed("crashed", "its worker was killed")

        def kill(self):
            killed.set()

    with (
        Journal(None, "tune_journal/2", {}) as journal,
        pytest.raises(InputError, match="the disk is full"),
    ):
        run([Waits(seconds, device="d0"), Broken(seconds, device="d1")], SPACE, journal=journal)
    assert not journal.has("race/2/0"), "what a killed worker answers is not recorded"


class Losing(SimulatedExecutor):
    """An executor whose node goes away in some measurements; `others` are left to go on on."""

    def __init__(self, *args, at: set[int], others: int, **more) -> None:
        super().__init__(*args, **more)
        self.at, self.others, self.number = at, others, 0

    def _count(self) -> None:
        self.number += 1
        if self.number in self.at:
            raise DeviceLost(f"the node {self.device.name} was lost")

    def trial(self, candidate):
        self._count()
        return super().trial(candidate)

    def turn(self, candidate):
        self._count()
        return super().turn(candidate)

    def replace_device(self) -> str:
        if not self.others:
            return "no node had room"
        self.others -= 1
        self.device = msgspec.structs.replace(self.device, name=f"{self.device.name}+")
        return ""


def searched(path: Path, *lost: Losing, resume: bool = False):
    with Journal(path, "tune_journal/2", {}, resume=resume) as journal:
        found = run([SimulatedExecutor(seconds, device="d0"), *lost], SPACE, journal=journal)
    return found, [json.loads(line) for line in path.read_bytes().splitlines()]


@pytest.mark.parametrize("at", [{1}, {12}])
def test_what_was_measured_on_a_lost_node_is_measured_once_more(at: set[int], tmp_path: Path) -> None:
    found, lines = searched(tmp_path / "j", Losing(seconds, device="d1", at=at, others=1))
    assert found.verdict == "winner"
    lost = [line for line in lines if isinstance(line["value"], dict) and "lost" in line["value"]]
    assert [one["device"] for one in lost] == ["d1"]
    assert [line["device"] for line in lines if line["key"] == lost[0]["key"] + "/again"] == ["d1+"]
    assert not any(candidate.code == "node_lost" for candidate in found.candidates)
    again, same = searched(tmp_path / "j", Losing(seconds, device="d1", at=set(), others=0), resume=True)
    assert same == lines
    assert again == found, "a search that is resumed loses the same nodes"


def test_a_candidate_that_loses_two_nodes_is_named_and_open(tmp_path: Path) -> None:
    found, lines = searched(tmp_path / "j", Losing(lambda changes: 1e-3, device="d1", at={3, 4}, others=2))
    lost = [candidate for candidate in found.candidates if candidate.code == "node_lost"]
    assert len(lost) == 1
    assert lost[0].reason == "the node d1+ was lost"
    keys = [line["key"] for line in lines]
    assert {f"trial/{lost[0].id}", f"trial/{lost[0].id}/again"} <= set(keys)


def test_candidates_of_a_device_that_has_no_other_go_on_elsewhere(tmp_path: Path) -> None:
    found, lines = searched(tmp_path / "j", Losing(seconds, device="d1", at={3}, others=0))
    lost = [candidate for candidate in found.candidates if candidate.code == "node_lost"]
    assert len(lost) == 1
    assert lost[0].reason == "the node d1 was lost; no node had room"
    assert all(
        candidate.code not in ("undecided", "not_tried") or candidate.device == "d0" for candidate in found.candidates
    )
    assert found.verdict == "winner" or lost[0].id in found.reason
    again, same = searched(tmp_path / "j", Losing(seconds, device="d1", at=set(), others=9), resume=True)
    assert (again, same) == (found, lines)


@pytest.mark.parametrize("grade", ["none", "run_to_run"])
def test_a_control_that_loses_two_nodes_is_not_said_to_break_constraints(grade: str, tmp_path: Path) -> None:
    class Control(Losing):
        def determinism(self, candidate, grade):
            raise DeviceLost(f"the node {self.device.name} was lost")

    lost = Control(lambda changes: 1e-3, device="d0", at={1, 2} if grade == "none" else set(), others=9)
    with Journal(tmp_path / "j", "tune_journal/2", {}) as journal:
        found = run(lost, SPACE, journal=journal, grade=grade)
    assert found.verdict == "undecided"
    assert found.reason.startswith("the policy that was given could not be measured: the node d0")
    assert not any("does not keep" in note for note in found.notes)


def test_a_search_without_any_device_left_can_be_resumed(tmp_path: Path) -> None:
    lost = Losing(seconds, device="d0", at={9}, others=0)
    with (
        Journal(tmp_path / "j", "tune_journal/2", {}) as journal,
        pytest.raises(DeviceLost, match=r"no node had room\. Fix: .*--resume"),
    ):
        run(lost, SPACE, journal=journal)
    with Journal(tmp_path / "j", "tune_journal/2", {}, resume=True) as journal:
        assert run(executors(1), SPACE, journal=journal).verdict == "winner"


# --- real processes --------------------------------------------------------------------------------------------------


def cores_of_children(others: Collection[int] = ()) -> dict[int, set[str]]:
    """Return process of a worker to the cores of all its threads, each as Linux writes them; not those of others."""
    cores: dict[int, set[str]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            if parent != os.getpid() or int(stat.parent.name) in others:
                continue
            texts = [task.read_text() for task in stat.parent.glob("task/*/status")]
        except OSError:  # it ended
            continue
        cores[int(stat.parent.name)] = {
            line.split()[1] for text in texts for line in text.splitlines() if line.startswith("Cpus_allowed_list")
        }
    return cores


@two_cores
@pytest.mark.parametrize(
    ("engine", "option"), [("onnxruntime", "session.intra_op.allow_spinning"), ("openvino", "ENABLE_CPU_PINNING")]
)
def test_all_threads_of_candidates_stay_on_their_cores(engine: str, option: str) -> None:
    pytest.importorskip(engine)
    devices, seen = [f"cpu:{core}" for core in CORES[:2]], []
    others = set(cores_of_children())  # processes that earlier tests left running

    def look(progress) -> None:
        if progress.stage == "race":
            seen.append(cores_of_children(others))

    xrt.tune(
        xrt.demo_model_path(),
        {"execution": {"device": "cpu", "engine": engine}},
        inputs="random",
        devices=devices,
        progress=look,
        spec={"space": {"options": {engine: {option: ["0", "1"]}}, "kernels": "off"}, "decide": QUICK},
    )  # fmt: skip
    workers = {pid: cores for one in seen for pid, cores in one.items()}
    assert len(workers) >= 2
    assert all(len(cores) == 1 for cores in workers.values()), workers
    assert set.union(*workers.values()) <= {str(core) for core in CORES[:2]}


@two_cores
def test_a_search_on_two_sets_of_cores(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    devices, seen = [f"cpu:{core}" for core in CORES[:2]], []
    others = set(cores_of_children())  # processes that earlier tests left running

    def look(progress) -> None:
        if progress.stage == "race":
            seen.append(frozenset(core for cores in cores_of_children(others).values() for core in cores))

    journal = tmp_path / "j"
    arguments = {
        "inputs": "random",
        "journal": journal,
        "devices": devices,
        "spec": {
            "space": {"options": {"onnxruntime": {"session.intra_op.allow_spinning": ["0", "1"]}}, "kernels": "off",
                      "threads": ["engine", 1, 64]},
            "decide": QUICK,
        },
    }  # fmt: skip
    policy = {"execution": {"device": "cpu", "engine": "onnxruntime"}}
    found = xrt.tune(xrt.demo_model_path(), policy, progress=look, **arguments)
    assert {candidate.device for candidate in found.candidates if candidate.figure is not None} == set(devices)
    assert {str(core) for core in CORES[:2]} in seen, "at some time both had a candidate"
    wide = next(candidate for candidate in found.candidates if candidate.changes.get("execution.threads") == 64)
    assert wide.code == "infeasible"
    assert "64 are more than the device has, which is 1" in wide.reason
    assert any("states 1 here" in note for note in found.notes)
    assert found.policy["execution"]["threads"] == 1
    assert found.devices == tuple(devices)
    assert all(name in str(found) for name in devices)
    size = journal.stat().st_size
    again = xrt.tune(xrt.demo_model_path(), policy, resume=True, **arguments)
    assert journal.stat().st_size == size
    assert msgspec.to_builtins(again.candidates) == msgspec.to_builtins(found.candidates)
    with pytest.raises(InputError, match=r"another search: devices differ \(devices was \[.*\] and is \[.*\]\)"):
        xrt.tune(xrt.demo_model_path(), policy, resume=True, **{**arguments, "devices": devices[:1]})
