# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`tools/pytorch_test_suite.py`: cases that a policy loses are told; one that ends its process costs only itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from sampled import ALL

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

TOOL = Path(__file__).resolve().parents[3] / "tools" / "pytorch_test_suite.py"
CASES = """
import os, pytest, torch
import xpuruntime.pytorch as xt

def test_multiplies():
    assert torch.equal(torch.eye(3) @ torch.eye(3), torch.eye(3))

def test_has_no_policy():
    assert xt.get_kernel_policy() is None

def test_scaled_dot_product_attention_4D_dropout_p_0_5_cpu():
    assert xt.get_kernel_policy() is None

def test_fails():
    assert False

def test_ends_its_process():
    os._exit(1)  # as pytest does where a case fails

@pytest.mark.skip
def test_skipped(): ...

def test_comes_after():
    pass
"""


def suite(*arguments, **more):
    command = [sys.executable, TOOL, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, **more)


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "cases"
    folder.mkdir()
    (folder / "test_cases.py").write_text(CASES)
    return folder


@pytest.mark.skipif(not ALL, reason="takes a minute: make test-patterns runs it")
def test_what_a_policy_loses_is_named_and_kept_results_are_not_run_again(folder):
    arguments = (folder.name, "test_cases.py", "--rows", "rows", "--policy")
    done = suite(*arguments, "ours", cwd=folder.parent)
    assert done.returncode == 1, done.stderr
    native, ours, meant, lost = done.stdout.splitlines()
    assert native == "test_cases.py, no policy: {'passed': 4, 'failed': 1, 'crashed': 1, 'skipped': 1}"
    assert ours == "test_cases.py, ours: 2 of 4 pass; served: {'cpu.blas': 1}"
    assert meant.startswith("  1 as it has to be: it expects the numbers that PyTorch's own kernel draws")
    assert lost.startswith("  failed: test_cases.py::test_has_no_policy: AssertionError: assert KernelPolicy(")
    rows = (folder.parent / "rows" / "test_cases.py-ours.jsonl").read_text().splitlines()
    assert ["test_cases.py::test_comes_after", "passed", "", {}] in map(json.loads, rows)

    (folder / "test_cases.py").write_text(CASES.replace("torch.eye(3))", "torch.eye(4))"))
    done = suite(*arguments, "looked-up", cwd=folder.parent)
    assert done.returncode == 1, done.stderr
    kept, looked_up, *lost = done.stdout.splitlines()
    assert kept == native
    assert looked_up == "test_cases.py, looked-up: 1 of 4 pass; served: {}"
    assert sorted(line.split("::")[1].split(":")[0] for line in lost) == [
        "test_has_no_policy", "test_multiplies", "test_scaled_dot_product_attention_4D_dropout_p_0_5_cpu",
    ]  # fmt: skip


def test_nothing_lost_is_success_and_nothing_to_compare_is_said(folder):
    (folder / "test_cases.py").write_text("def test_nothing():\n    pass\n")
    done = suite(folder, "test_cases.py", "--policy", "looked-up")
    assert (done.returncode, done.stdout.splitlines()[-1][:45]) == (
        0,
        "test_cases.py, looked-up: 1 of 1 pass; served",
    ), done.stderr
    nothing = suite(folder, "test_cases.py", "-k", "no_such_case")
    assert nothing.returncode != 0
    assert "nothing to compare" in nothing.stderr
