# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Fixes of rejected candidates: each can change the outcome, on machines that lack one thing or the other."""

from __future__ import annotations

import re
import shlex
import subprocess
from importlib import metadata
from typing import Any

import msgspec
import pytest
from packaging.requirements import Requirement
from test_real_engines import H200, LAPTOP, MODEL, ORT

import xpuruntime as xrt
from xpuruntime.engines.registry import default_registry
from xpuruntime.errors import XpuRuntimeError
from xpuruntime.planning import PlanRequest, resolve
from xpuruntime.planning.candidates import kinds_of
from xpuruntime.policies import Policy
from xpuruntime.runtime.machine import EngineFacts, Machine
from xpuruntime.runtime.packages import install_command

ENGINES = default_registry().engines()
NAMED = ("onnxruntime", "tensorrt", "tensorrt-rtx", "openvino", "qnn", "torch")
DEVICES = ("cpu", "cuda:0", "cuda:7", "gpu", "npu", "rocm:0", "metal", "dml", "auto")
OPENVINO = EngineFacts(name="openvino", version="2026.4.1", loadable=True, providers=("CPU",))
QNN = EngineFacts(name="qnn", version="2.7.0", loadable=True, detail={"runs_on": "simulator"})
ORT_CPU = msgspec.structs.replace(ORT, providers=("CPUExecutionProvider",))
#: What is there: nothing but ONNX Runtime for the CPU, more engines, a GPU, a GPU whose driver the core cannot use.
MACHINES = {
    "bare": msgspec.structs.replace(LAPTOP, engines={"onnxruntime": ORT_CPU}),
    "engines": msgspec.structs.replace(LAPTOP, engines={"onnxruntime": ORT_CPU, "openvino": OPENVINO, "qnn": QNN}),
    "nothing": msgspec.structs.replace(LAPTOP, engines={}),
    "gpu": msgspec.structs.replace(
        LAPTOP, cuda=(H200,), cuda_reason=None, core_cuda=True, engines={"onnxruntime": ORT}
    ),
    "no core": msgspec.structs.replace(LAPTOP, cuda=(H200,), cuda_reason=None, engines={"onnxruntime": ORT}),
}
EXTRAS = {engine.extra: name for name, engine in ENGINES.items() if engine.extra is not None}


def verdicts(machine: Machine, engine: str, device: str) -> dict[str, tuple[str, str]]:
    """Return code and fix of each rejected candidate."""
    policy = Policy.coerce({"execution": {"engine": engine, "device": device}})
    try:
        plan = resolve(PlanRequest(model=MODEL), policy, machine, ENGINES)
    except XpuRuntimeError as error:
        codes = {}
        for line in str(error).splitlines()[1:]:
            candidate, code, rest = line.strip().split(": ", 2)
            codes[candidate] = code, rest.partition(" Fix: ")[2]
        return codes
    return {v.candidate: (v.code, v.fix or "") for v in plan.verdicts}


def named_engines(fix: str) -> list[str]:
    """Return the engines that a fix tells to use or to install."""
    stated = re.search(r"execution\.engine: ([\w-]+(?: or [\w-]+)*)", fix)
    taking = re.search(r"name an engine that takes this one: ([\w-]+(?: or [\w-]+)*)", fix)
    names = [name for side in (stated, taking) if side for name in side[1].split(" or ")]
    return names + [EXTRAS[extra] for extra in re.findall(r"xpuruntime\[([\w-]+)\]", fix) if extra in EXTRAS]


@pytest.mark.parametrize("what", MACHINES)
@pytest.mark.parametrize("device", DEVICES)
def test_no_fix_names_an_engine_that_cannot_serve_the_device(what: str, device: str) -> None:
    machine, judged = MACHINES[what], 0
    for engine in (*NAMED, "auto"):
        for candidate, (code, fix) in verdicts(machine, engine, device).items():
            judged += 1
            asked = candidate.partition("@")[2].partition(":")[0]
            other = re.search(r"use device (\w+)(?::\d+)? with execution", fix)
            kind = other[1] if other else asked
            for name in named_engines(fix):
                assert kind in ("auto", *kinds_of(ENGINES[name], machine)), (candidate, code, fix)
            if code in ("engine_missing", "engine_broken"):  # what is installed is asked for only where it would serve
                assert asked in ("auto", *kinds_of(ENGINES[candidate.partition("@")[0]], machine))
                assert asked != "cuda" or machine.cuda
    assert judged >= len(NAMED)


def applied(part: str, engine: str, device: str) -> tuple[str, str]:
    """Return engine and device after a fix of the device."""
    to = re.search(r"use device ([\w:]+)", part)
    return (named_engines(part) or [engine])[0], to[1] if to else device


@pytest.mark.parametrize("what", MACHINES)
@pytest.mark.parametrize("device", DEVICES[:-1])
def test_a_fix_of_the_device_runs_the_model_or_installs_what_does(what: str, device: str) -> None:
    machine, tried = MACHINES[what], 0
    for engine in (*NAMED[:-1], "auto"):
        for candidate, (code, fix) in verdicts(machine, engine, device).items():
            if code not in ("device_missing", "device_unsupported") or "macOS" in fix or "Windows" in fix:
                continue
            for part in fix.split(", or "):
                tried += 1
                chosen, where = applied(part, engine, device)
                codes = {found for found, _ in verdicts(machine, chosen, where).values()}
                installs = "pip install" in part or what == "nothing"
                assert "accepted" in codes or (installs and "engine_missing" in codes), (candidate, fix, codes)
    assert tried or device in ("cpu", "cuda:0", "rocm:0")


def test_a_fix_names_an_engine_that_is_here_before_one_that_is_not() -> None:
    fixes = {name: verdicts(MACHINES[name], "tensorrt", "cuda:0")["tensorrt@cuda:0"][1] for name in ("bare", "engines")}
    assert fixes == {
        "bare": "use device cpu with execution.engine: onnxruntime",
        "engines": "use device cpu with execution.engine: onnxruntime or openvino",
    }
    lacking = verdicts(MACHINES["nothing"], "tensorrt", "cuda:0")["tensorrt@cuda:0"][1]
    assert lacking.startswith("use device cpu with execution.engine: onnxruntime, after pip install onnxruntime")


@pytest.mark.parametrize("what", MACHINES)
@pytest.mark.parametrize("device", DEVICES)
def test_a_command_of_a_fix_is_one_that_a_shell_takes(what: str, device: str) -> None:
    for engine in (*NAMED, "auto"):
        for _, fix in verdicts(MACHINES[what], engine, device).values():
            commands = re.findall(r"`([^`]+)`", fix) or ([fix] if fix.startswith("pip ") else [])
            assert commands or "pip install" not in fix or "after pip install" in fix, fix
            for command in commands:
                done = subprocess.run(["bash", "-n", "-c", command], capture_output=True, check=False)
                assert (done.returncode, done.stderr) == (0, b""), command


@pytest.mark.parametrize("extra", ["cuda", "tensorrt", "tensorrt-rtx", "openvino", "torch", "nccl", "nncf"])
def test_what_is_missing_is_installed_from_its_own_packages(extra: str) -> None:
    command, _, note = install_command(extra).removeprefix("`").partition("` (")
    assert note == f"the extra xpuruntime[{extra}])"
    words = shlex.split(command)
    assert words[:2] == ["pip", "install"]
    assert len(words) > 2
    stated = {Requirement(line).name for line in metadata.requires("xpuruntime") or ()}
    assert {Requirement(word).name for word in words[2:]} <= stated - {"xpuruntime"}


@pytest.mark.parametrize(("extra", "parts"), [("ray", {"serve", "data"}), ("quack", {"cu13"})])
def test_parts_of_a_missing_package_are_installed_with_it(extra: str, parts: set[str]) -> None:
    words = shlex.split(install_command(extra).split("`")[1])
    assert Requirement(words[2]).extras == parts


pytest.importorskip("onnxruntime")


@pytest.mark.parametrize("rule", [{"precision": "fp32"}, {"use": "cpu"}])
def test_a_rule_that_names_no_node_is_told(rule: dict[str, str]) -> None:
    rules = [{"match": {"node": "fcc1"}, **rule}, {"match": {"node": "fc*"}, "precision": "fp32"}]
    execution = {"precision": "fp16", "device": "cpu", "engine": "onnxruntime"}
    policy: dict[str, Any] = {"execution": execution, "kernels": {"rules": rules}}
    plan = xrt.plan(xrt.demo_model_path(), policy=policy)
    wrong, right = plan.control("kernels.rules[0]"), plan.control("kernels.rules[1]")
    assert wrong is not None
    assert right is not None
    assert wrong.enforceability == "unsupported"
    assert wrong.reason == "the pattern 'fcc1' names no node of the model; did you mean 'fc1'?"
    assert right.enforceability == "enforced"
    assert any("kernels.rules[0]" in line and "correct match.node" in line for line in plan.warnings)
    with pytest.raises(xrt.UnsupportedOperationError, match="names no node"):
        xrt.plan(xrt.demo_model_path(), policy={"mode": "strict", **policy})


@pytest.mark.parametrize(
    ("kernels", "asked", "near"),
    [
        ({"conv": "cpu.refrence"}, "kernels.conv: cpu.refrence is", "cpu.reference"),
        ({"rules": [{"match": {"op": "matmul"}, "use": "cpu.referense"}]}, "kernels.rules[0]: ", "cpu.reference"),
    ],
)
def test_a_misspelt_kernel_is_told_the_nearest(kernels: dict[str, Any], asked: str, near: str) -> None:
    policy = {"mode": "strict", "execution": {"engine": "onnxruntime", "device": "cpu"}, "kernels": kernels}
    with pytest.raises(xrt.UnsupportedOperationError) as error:
        xrt.plan(xrt.demo_model_path(), policy=policy)
    line = next(line for line in str(error.value).splitlines() if line.strip().startswith(asked))
    assert f"; did you mean '{near}'? Fix: write {near}, or use mode: prefer" in line


def test_a_format_that_an_engine_does_not_take_is_in_words() -> None:
    assert verdicts(MACHINES["engines"], "torch", "cpu")["torch@cpu"] == (
        "format_unsupported",
        "use execution.engine: onnxruntime or openvino, or give torch an exported program (.pt2), a module of PyTorch "
        "or a folder of Transformers",
    )


def test_gpu_without_a_number_is_told_the_name_of_nvidias() -> None:
    fixes = {name: fix for name, (_, fix) in verdicts(MACHINES["engines"], "auto", "gpu").items()}
    assert fixes["onnxruntime@gpu"] == "use device cpu; an NVIDIA GPU is device cuda:0"
    assert "cuda" not in fixes["openvino@gpu"]


def test_the_candidate_that_could_run_here_comes_first() -> None:
    policy = Policy.coerce({"execution": {"precision": "int8"}})
    with pytest.raises(XpuRuntimeError) as refused:
        resolve(PlanRequest(model=MODEL), policy, MACHINES["engines"], ENGINES)
    first, *others = [line.split(": ")[1] for line in str(refused.value).splitlines()[1:]]
    assert first == "calibration_missing"
    assert "device_missing" in others
