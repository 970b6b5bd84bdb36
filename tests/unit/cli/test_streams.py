# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Full disks and closed streams: one line that names the place, the documented exit code, and nothing half written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

CALL = f"{sys.executable} -c 'from xpuruntime.cli import main; main()'"
FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="streams of POSIX")


def shell(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, timeout=120)


@FULL
@pytest.mark.parametrize("arguments", ["plan {} --device cpu", "plan {} --device cpu --json", "policy schema"])
def test_standard_output_that_is_full_is_named(digits: str, arguments: str) -> None:
    done = shell(f"{CALL} {arguments.format(digits)} >/dev/full")
    assert done.returncode == 3
    assert done.stderr == "error: standard output: No space left on device\n"


def test_a_reader_that_has_gone_ends_it_quietly(digits: str) -> None:
    done = shell(f"{CALL} plan {digits} --device cpu | true; echo ${{PIPESTATUS[0]}}")
    assert (done.stdout, done.stderr) == ("141\n", "")


def test_closed_streams_are_no_bug(digits: str) -> None:
    done = shell(f"{CALL} plan {digits} --device cpu >&-")
    assert (done.returncode, done.stderr) == (0, "")
    done = shell(f"{CALL} plan {digits} --device cpu --json 2>&-")
    assert done.returncode == 0
    assert done.stdout.startswith("{")
    done = shell(f"{CALL} plan {digits} --device nonsense 2>&- >&-")
    assert done.returncode == 2


def test_an_output_that_grows_too_large_is_named_and_leaves_the_old_file(digits: str, tmp_path: Path) -> None:
    out = tmp_path / "out.npz"
    np.savez(out, logits=np.zeros(1))
    before = out.read_bytes()
    done = shell(f"ulimit -f 0; {CALL} run {digits} --device cpu --output {out}")
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1] == f"error: {out}: File too large"
    assert [path.name for path in tmp_path.iterdir()] == ["out.npz"]
    assert out.read_bytes() == before


@pytest.mark.skipif(getattr(os, "geteuid", int)() == 0, reason="root may write everywhere")
def test_a_folder_that_takes_no_files_is_named_by_the_output(digits: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    done = shell(f"{CALL} run {digits} --device cpu --output {tmp_path}/out.npz")
    tmp_path.chmod(0o755)
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1] == f"error: {tmp_path}/out.npz: Permission denied"


@pytest.fixture
def many(tmp_path: Path) -> str:
    """A model with 100 inputs and a sequence as its output."""
    from onnx import TensorProto, helper

    names = [f"x{index}" for index in range(100)]
    graph = helper.make_graph(
        [helper.make_node("SequenceConstruct", names, ["s"])],
        "many",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in names],
        [helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, [2])],
    )
    path = tmp_path / "many.onnx"
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.write_bytes(model.SerializeToString())
    return str(path)


def test_bench_times_what_a_model_without_buffers_allows(many: str) -> None:
    done = shell(f"{CALL} bench {many} --device cpu --runs 3 --json")
    assert done.returncode == 0
    assert list(json.loads(done.stdout)["latency"]) == ["run"]
    notes = done.stderr.splitlines()
    assert notes[0].startswith(
        "note: probe inputs were generated (seed 0) for: x0 [2], x1 [2], x2 [2], x3 [2] and 96 more."
    )
    assert notes[1] == "note: bind is left out: output 's' is no tensor, so it has no fixed buffer. Fix: use run()"
