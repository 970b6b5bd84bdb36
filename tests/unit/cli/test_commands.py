# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What users type: right, nearly right, and wrong."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from onnx import parser

from xpuruntime.testing import models

if TYPE_CHECKING:
    from pathlib import Path

Xrt = Any


class TestUsage:
    def test_help_and_version(self, xrt: Xrt) -> None:
        shown = xrt("--help")
        assert shown.code == 0
        for command in ("devices", "doctor", "run", "bench", "profile", "plan", "explain", "kernels", "policy", "demo"):
            assert command in shown.out
            assert xrt(command, "--help").code == 0
        assert "Exit codes" in xrt("bench", "-h").out
        assert xrt("--version").out.startswith("xpuruntime ")

    def test_nothing_at_all_shows_the_help(self, xrt: Xrt) -> None:
        for arguments in ((), ("policy",)):
            result = xrt(*arguments)
            assert result.code == 2
            assert "Usage: xrt" in result.out + result.err

    def test_an_unexpected_error_is_no_traceback_but_a_bug(self, xrt: Xrt, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(*_: Any) -> Any:
            raise ZeroDivisionError("by design")

        monkeypatch.setattr("xpuruntime.runtime.snapshot.machine_snapshot", broken)
        result = xrt("devices", "--json")
        assert result.code == 70
        assert result.json()["error"]["type"] == "ZeroDivisionError"
        assert "--debug" in result.err
        with pytest.raises(ZeroDivisionError):
            xrt("--debug", "devices")
        monkeypatch.setenv("XPURUNTIME_DEBUG", "1")
        with pytest.raises(ZeroDivisionError):
            xrt("devices")


class TestPlan:
    def test_tables(self, xrt: Xrt, digits: str) -> None:
        result = xrt("plan", digits, "--device", "cpu")
        assert not [line for line in result.out.splitlines() if line.endswith(" ")]
        assert result.code == 0
        assert "onnxruntime@cpu" in result.out
        assert "execution.device" in result.out
        assert result.err == ""

    def test_for_another_machine(self, xrt: Xrt, digits: str, tmp_path: Path) -> None:
        machine = xrt("devices", "--json").json()
        machine["core_cuda"], machine["cuda_reason"] = True, None
        machine["cuda"] = [
            {
                "index": 0,
                "name": "NVIDIA H200",
                "compute_capability": [9, 0],
                "total_memory": 150 << 30,
                "sm_count": 132,
                "driver_version": [13, 0],
                "runtime_version": [13, 0],
                "pci_id": "0000:01:00.0",
            }
        ]
        ort = machine["engines"]["onnxruntime"]
        ort["providers"], ort["broken"] = ["CUDAExecutionProvider", "CPUExecutionProvider"], {}
        path = tmp_path / "machine.json"
        path.write_text(json.dumps(machine))
        plan = xrt("plan", digits, "--machine", path, "--json").json()
        assert plan["device"] == "cuda:0"
        ort["providers"], ort["broken"] = ["CPUExecutionProvider"], {"CUDAExecutionProvider": "libcudnn.so.9 not found"}
        path.write_text(json.dumps(machine))
        result = xrt("plan", digits, "--machine", path, "--device", "cuda:0")
        assert result.code == 3
        assert "libcudnn.so.9 not found" in result.err
        assert "xpuruntime[cuda]" in result.err

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": "xpuruntime.machine/1"}', "\xff"])
    def test_a_machine_file_that_is_none(self, xrt: Xrt, digits: str, tmp_path: Path, text: str) -> None:
        path = tmp_path / "machine.json"
        path.write_bytes(text.encode("latin-1"))
        result = xrt("plan", digits, "--machine", path)
        assert result.code == 2
        assert "machine.json" in result.err
        assert "xrt devices --json" in result.err

    def test_a_provider_that_this_release_does_not_know(self, xrt: Xrt, digits: str, tmp_path: Path) -> None:
        machine = json.loads(xrt("devices", "--json").out)
        openvino = {"name": "openvino", "version": "2026.3.0", "loadable": True, "providers": ["CPU", "NVIDIA"]}
        machine["engines"]["openvino"] = openvino
        path = tmp_path / "machine.json"
        path.write_text(json.dumps(machine))
        result = xrt("plan", digits, "--machine", path, "--engine", "openvino")
        assert result.code in (0, 1, 3), result.err


class TestRun:
    def test_probe_inputs_are_said(self, xrt: Xrt, digits: str) -> None:
        result = xrt("run", digits, "--device", "cpu")
        assert result.code == 0
        assert "probe inputs were generated (seed 0) for: image [1, 1, 8, 8]" in result.err
        assert "logits" in result.out

    def test_files_in_and_out(self, xrt: Xrt, two_inputs: str, tmp_path: Path) -> None:
        a, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones((2, 3), np.float32)
        np.save(tmp_path / "a.npy", a)
        np.savez(tmp_path / "b.npz", b=b, other=a)
        out = tmp_path / "out.npz"
        given = ("-i", f"a=@{tmp_path / 'a.npy'}", "-i", f"b=@{tmp_path / 'b.npz'}")
        result = xrt("run", two_inputs, *given, "-o", out, "-d", "cpu")
        assert result.code == 0, result.err
        with np.load(out) as saved:
            np.testing.assert_array_equal(saved["sum"], a + b)
            np.testing.assert_array_equal(saved["count"], a.astype(np.int64))
        assert [path.name for path in tmp_path.iterdir() if "part" in path.name] == []

    def test_one_input_and_one_output_need_no_names(self, xrt: Xrt, digits: str, tmp_path: Path) -> None:
        np.save(tmp_path / "x.npy", np.zeros((2, 1, 8, 8), np.float32))
        out = tmp_path / "out.npy"
        assert xrt("run", digits, "-i", f"@{tmp_path / 'x.npy'}", "-o", out, "-d", "cpu").code == 0
        assert np.load(out).shape == (2, 10)

    @pytest.mark.parametrize("name", [None, "y.npz", "y.npy"])
    def test_strings_are_shown_and_written(self, xrt: Xrt, tmp_path: Path, name: str | None) -> None:
        text = """<ir_version: 9, opset_import: ["" : 17, "ai.onnx.ml" : 2]> g (int64[n] x) => (string[n] y) {
            y = ai.onnx.ml.LabelEncoder<keys_int64s = [0, 1], values_strings = ["cat", "Dögg"]>(x) }"""
        path = models.save(parser.parse_model(text), tmp_path)
        output = () if name is None else ("-o", tmp_path / name)
        result = xrt("run", path, "--device", "cpu", "--input", "x=[1,0]", *output)
        assert result.code == 0, result.err
        assert "Dögg" in result.out
        if name is not None:
            found = np.load(tmp_path / name)
            assert list(found if name.endswith(".npy") else found["y"]) == ["Dögg", "cat"]

    def test_a_model_that_declares_another_output_is_timed(self, xrt: Xrt, tmp_path: Path) -> None:
        text = """<ir_version: 9, opset_import: ["" : 17]> g (float[n, 3] x) => (float[1, 3] y) { y = Relu(x) }"""
        path = models.save(parser.parse_model(text), tmp_path)
        result = xrt("bench", path, "--device", "cpu", "--engine", "onnxruntime", "--dim", "n=4", "-n", "3")
        assert result.code == 0, result.err

    def test_bfloat16_comes_back_from_the_file_it_was_written_to(self, xrt: Xrt, tmp_path: Path) -> None:
        small = pytest.importorskip("ml_dtypes")
        path, x = models.save(models.identity("bfloat16"), tmp_path, "half.onnx"), tmp_path / "x.npy"
        np.save(x, np.array([[1.5, -2, 3]], small.bfloat16))
        y = tmp_path / "y.npz"
        assert xrt("run", path, "-i", f"@{x}", "-o", y, "-d", "cpu").code == 0
        with np.load(y) as saved:
            (name,) = saved.files
            np.testing.assert_array_equal(saved[name].view(small.bfloat16), [[1.5, -2, 3]])

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ("imge=@x.npy", "no input 'imge'. It has: image. Fix: --input image=..."),
            ("image", "write NAME=@file.npy"),
            ("image=@missing.npy", "cannot read missing.npy"),
            ("image=@text.npy", "text.npy is no .npy or .npz file of plain arrays: its first bytes are of neither"),
            ("image=@objects.npy", "or it holds Python objects. Fix: write the array with np.save"),
            ("image=@cut.npz", "cut.npz"),
            ("image=@other.npz", "has no array 'image', it has x"),
            ("image=[[1, 2], [3]]", "image"),
            ('image={"a": 1}', "not a regular array"),
            ("image=nonsense", "neither JSON nor @file"),
            ("image=" + "[" * 5000, "neither JSON nor @file"),
            ("image=@x64.npy", "float64"),
            ("image=@small.npy", "8"),
        ],
    )
    def test_wrong_values(
        self, xrt: Xrt, digits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, message: str
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "text.npy").write_text("not an array")
        np.save(tmp_path / "objects.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
        np.savez(tmp_path / "other.npz", x=np.zeros(3))
        (tmp_path / "cut.npz").write_bytes((tmp_path / "other.npz").read_bytes()[:-40])
        np.save(tmp_path / "x64.npy", np.zeros((1, 1, 8, 8)))
        np.save(tmp_path / "small.npy", np.zeros((1, 1, 7, 8), np.float32))
        result = xrt("run", digits, "--input", value, "--device", "cpu")
        assert result.code == 2, result
        assert message in result.err
        assert "allow_pickle" not in result.err

    @pytest.mark.parametrize(
        ("dims", "message"),
        [
            (["N=-1"], "write NAME=SIZE"),
            (["N"], "write NAME=SIZE"),
            (["M=4"], "no dimension 'M'. It has: N. Fix: --dim N=4"),
        ],
    )
    def test_wrong_dims(self, xrt: Xrt, digits: str, dims: list[str], message: str) -> None:
        result = xrt("run", digits, *(part for dim in dims for part in ("--dim", dim)))
        assert result.code == 2
        assert message in result.err

    @pytest.mark.parametrize("name", ["out.txt", "nowhere/out.npz", "out.npy", "folder.npz"])
    def test_wrong_outputs_are_refused_before_anything_runs(
        self, xrt: Xrt, two_inputs: str, tmp_path: Path, name: str
    ) -> None:
        (tmp_path / "folder.npz").mkdir()
        result = xrt("run", two_inputs, "-o", tmp_path / name)
        assert result.code == 2
        assert "--output" in result.err
        assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.npz"]

    def test_a_policy_that_cannot_be_enforced_warns_once_on_stderr(self, xrt: Xrt, digits: str, tmp_path: Path) -> None:
        path = tmp_path / "p.yaml"
        path.write_text("execution: {device: cpu}\nkernels: {matmul: cublasLt}\n")
        result = xrt("run", digits, "--policy", path, "--json")
        assert result.code == 0, result.err
        assert result.err.count("warning: ") == 1
        assert "kernels.matmul" in result.err
        assert any("kernels.matmul" in line for line in result.json()["warnings"])


def test_doctor_shows_fixes_and_exits_with_3(xrt: Xrt, monkeypatch: pytest.MonkeyPatch) -> None:
    from xpuruntime.cli import diagnosing
    from xpuruntime.runtime import doctor

    facts = doctor.diagnose().facts
    import msgspec

    broken = doctor.examine(msgspec.structs.replace(facts, core_error="undefined symbol"))
    monkeypatch.setattr(diagnosing, "diagnosis_apart", lambda: broken)
    result = xrt("doctor")
    assert result.code == 3
    assert "core_missing" in result.out
    assert "fix:" in result.out
