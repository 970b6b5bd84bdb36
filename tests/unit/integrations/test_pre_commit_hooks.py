# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The hooks of pre-commit, run by pre-commit in a repository of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import xpuruntime as xrt

pytest.importorskip("pre_commit", reason="pip install pre-commit")

HOOKS = Path(__file__).resolve().parents[3] / ".pre-commit-hooks.yaml"
POLICY = "execution: {engine: onnxruntime, device: cpu}\n"


def git(folder: Path, *words: str) -> str:
    names = ("-c", "user.name=tests", "-c", "user.email=tests@localhost", "-c", "commit.gpgsign=false")
    command = ["git", *names, *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with a model, its lock and its policy, and the configuration of the page on integrations."""
    hooks, folder = tmp_path_factory.mktemp("hooks"), tmp_path_factory.mktemp("project")
    shutil.copy(HOOKS, hooks)
    for side in (hooks, folder):
        git(side, "init", "-q")
    git(hooks, "add", ".")
    git(hooks, "commit", "-q", "-m", "hooks")
    (folder / ".pre-commit-config.yaml").write_text(
        f"repos:\n  - repo: {hooks}\n    rev: {git(hooks, 'rev-parse', 'HEAD')}\n"
        "    hooks: [{id: xrt-policy}, {id: xrt-lock}]\n"
    )
    model = Path(shutil.copy(xrt.demo_model_path(), folder / "digits.onnx"))
    (folder / "policy.yaml").write_text(POLICY)
    xrt.lock(model, folder / "policy.yaml", folder / "digits.lock")
    (folder / "poetry.lock").write_text('[[package]]\nname = "digits.onnx"\n')
    git(folder, "add", ".")
    return folder


def pre_commit(folder: Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PRE_COMMIT_HOME": str(folder / ".git" / "pre-commit")}
    command = [sys.executable, "-m", "pre_commit", "run", "--all-files", "--color", "never"]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


def test_the_manifest_is_valid():
    assert subprocess.run([sys.executable, "-m", "pre_commit", "validate-manifest", HOOKS], check=False).returncode == 0


def test_hooks_pass_where_policies_are_valid_and_locks_hold(project: Path):
    done = pre_commit(project)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Passed") == 2


def test_hooks_name_the_line_of_what_is_wrong(project: Path):
    model, policy = project / "digits.onnx", project / "policy.yaml"
    before = model.read_bytes()
    policy.write_text(POLICY + "kernls: {}\n")
    model.write_bytes(before + b"\x9a\x06\x01x")  # a field that ONNX does not know, which changes the digest alone
    try:
        git(project, "add", ".")
        done = pre_commit(project)
    finally:
        policy.write_text(POLICY)
        model.write_bytes(before)
        git(project, "add", ".")
    assert done.returncode == 1
    assert "policy.yaml:2:1: " in done.stdout
    assert "digits.lock:55:1: evidence.lock.model: " in done.stdout
    assert "Fix: restore the file that was locked" in done.stdout
