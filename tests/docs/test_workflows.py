# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The jobs of the page on CI, and the action, are run as far as a shell can: all but the installation of the package.

The jobs of the repository itself run targets of the Makefile.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import yaml
from docs_blocks import ROOT, blocks

import xpuruntime as xrt

JOBS = [yaml.safe_load(block.body) for block in blocks(ROOT / "docs" / "in-ci.md") if block.language == "yaml"]


def jobs() -> dict[str, tuple[list[str], dict]]:
    """Return the commands of each system's job, and the job."""
    github = next(job for job in JOBS if "jobs" in job)["jobs"]["verify"]
    gitlab = next(job for job in JOBS if "verify" in job)["verify"]
    return {
        "github": ([step["run"] for step in github["steps"] if "run" in step], github),
        "gitlab": (gitlab["script"], gitlab),
    }


def run(commands: list[str], folder: Path) -> None:
    """Run commands in a shell that stops at the first that fails, as the runners of both systems do."""
    ours = [line for line in commands if not line.startswith("pip install ")]
    assert 0 < len(ours) < len(commands)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "GITHUB_STEP_SUMMARY": str(folder / "summary.md")}
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", "\n".join(ours)],
        cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def lock(folder: Path, policy: str) -> None:
    (folder / "policy.yaml").write_text(policy)
    xrt.lock(folder / "model.onnx", folder / "policy.yaml", folder / "model.lock")


@pytest.fixture
def folder(reader_folder: Path) -> Path:
    """The reader's folder, with a policy that has claims of speed, and a lock."""
    speed = "verify: {speed: {max_slowdown: 50%, budget: 5s}, start: 60s}\n"
    lock(reader_folder, f"execution: {{engine: onnxruntime, device: cpu, precision: fp32}}\n{speed}")
    return reader_folder


def test_the_job_of_github(folder: Path):
    commands, job = jobs()["github"]
    run(commands, folder)
    uploads = [step["with"] for step in job["steps"] if "upload" in step.get("uses", "")]
    sarif = json.loads((folder / uploads[0]["sarif_file"]).read_text())
    assert sarif["version"] == "2.1.0"
    assert {path.name for path in folder.glob(uploads[1]["path"])} == {"verify.sarif", "verify.html", "verify.json"}
    assert "| claim |" in (folder / "summary.md").read_text()
    assert "speed.latency.p50" in (folder / "verify.json").read_text()


def test_the_job_of_gitlab(folder: Path):
    commands, job = jobs()["gitlab"]
    run(commands, folder)
    reports = job["artifacts"]["reports"]
    assert ET.parse(folder / reports["junit"]).getroot().get("failures") == "0"
    assert (folder / reports["metrics"]).read_text().endswith("# EOF\n")
    assert all((folder / path).is_file() for path in job["artifacts"]["paths"])


def test_a_command_that_fails_stops_the_job(folder: Path):
    commands, _ = jobs()["gitlab"]
    (folder / "retrained.onnx").replace(folder / "model.onnx")
    with pytest.raises(AssertionError, match=r"evidence\.lock\.model"):
        run(commands, folder)


ACTION = ROOT / "action.yml"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def run_action(folder: Path, **given: str) -> tuple[int, str]:
    """Run the steps of the action as GitHub does, but for the installation; returns exit code and printed text."""
    action = yaml.safe_load(ACTION.read_text(encoding="utf-8"))
    inputs = {name: given.get(name, value.get("default", "")) for name, value in action["inputs"].items()}
    expression = re.compile(r"\$\{\{ inputs\.(\w+) \}\}")
    (install, step) = action["runs"]["steps"]
    assert install["if"] == "inputs.install != ''"
    env = {name: expression.sub(lambda match: inputs[match[1]], value) for name, value in step["env"].items()}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    files = {"GITHUB_OUTPUT": folder / "output", "GITHUB_STEP_SUMMARY": folder / "summary.md"}
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", step["run"]],
        cwd=folder, env={**os.environ, "PATH": path, **{name: str(file) for name, file in files.items()}, **env},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (folder / "output").read_text() == f"exit-code={done.returncode}\n", done.stdout + done.stderr
    return done.returncode, done.stdout


@pytest.mark.parametrize("path", [ACTION, *WORKFLOWS], ids=lambda path: path.stem)
def test_actions_and_workflows_fit_the_schemas_of_github(path: Path):
    pytest.importorskip("check_jsonschema", reason="pip install check-jsonschema")
    schema = f"vendor.github-{'actions' if path == ACTION else 'workflows'}"
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_action(reader_folder: Path):
    code, printed = run_action(reader_folder, model="model.onnx", policy="policy.yaml", arguments="--only evidence")
    assert (code, "::error" in printed) == (0, False), printed
    assert json.loads((reader_folder / "xrt-verify.sarif").read_text())["version"] == "2.1.0"
    assert (reader_folder / "xrt-verify.html").is_file()
    assert "| claim |" in (reader_folder / "summary.md").read_text()


def test_the_action_fails_with_annotations(reader_folder: Path):
    (reader_folder / "policy.yaml").write_text("execution: {engine: onnxruntime, device: cpu, layout: nchw}\n")
    code, printed = run_action(reader_folder, model="model.onnx", policy="policy.yaml", arguments="--only evidence")
    assert (code, "::error file=policy.yaml,line=1," in printed) == (1, True), printed


def test_the_action_names_the_line_of_the_lock_that_drifted(reader_folder: Path):
    xrt.lock(reader_folder / "model.onnx", reader_folder / "policy.yaml", reader_folder / "model.lock")
    (reader_folder / "retrained.onnx").replace(reader_folder / "model.onnx")
    code, printed = run_action(
        reader_folder, model="model.onnx", policy="policy.yaml", lock="model.lock", arguments="--only evidence"
    )
    found = re.findall(r"^::error file=model\.lock,line=(\d+),col=1,title=evidence\.lock\.(\w+)::", printed, re.M)
    lines = (reader_folder / "model.lock").read_text().splitlines()
    assert (code, {name for _, name in found}) == (1, {"model", "output"}), printed
    assert all("sha256" in lines[int(line) - 1] for line, _ in found)
    assert "| `evidence.lock.model` |" in (reader_folder / "summary.md").read_text()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_the_jobs_of_the_repository_run_targets_that_exist(path: Path):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^([\w-]+):", makefile, re.M)
    targets += re.findall(r"^CPP_TESTS := (.*)$", makefile, re.M)[0].split()
    for name, job in yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].items():
        for step in job.get("steps", ()):
            for target in re.findall(r"^make ([\w-]+)", step.get("run", ""), re.M):
                assert target in targets, f"{name}: make {target}"
