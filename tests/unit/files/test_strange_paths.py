# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Paths that no system takes, names that are not UTF-8, and terminals that are not: our errors, clean output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import xpuruntime as xrt
from xpuruntime.cli.results import save_outputs
from xpuruntime.distributed import read_choices
from xpuruntime.engines.tensorrt.building import CacheFile
from xpuruntime.evidence import Report, compare_reports
from xpuruntime.evidence.profile import check_trace
from xpuruntime.files.paths import json_bytes, user_path
from xpuruntime.ops.plugins import load_library
from xpuruntime.ops.tuning_cache import TuningCache
from xpuruntime.runtime.snapshot import load_machine

if TYPE_CHECKING:
    from collections.abc import Callable

MODEL = xrt.demo_model_path()
ENTRY: dict[str, Any] = {"times": [{"kernel": "a.b", "config": "", "microseconds": 1.0}], "validators": {}}


def tuning(path: str) -> None:
    note = TuningCache(path).put("k", ENTRY)
    assert TuningCache(path).find("k", {})[0] is None
    raise xrt.InputError(note)


def policy(cache: str) -> dict[str, Any]:
    return {"execution": {"engine": "onnxruntime", "device": "cpu", "artifacts": {"cache": cache}}}


#: What takes the path of a user, to read it or to write there.
CALLS: dict[str, Callable[[str], object]] = {
    "plan": xrt.plan,
    "session": xrt.InferenceSession,
    "program": lambda path: xrt.plan(f"{path}.pt2"),
    "artifact": lambda path: xrt.InferenceSession(f"{path}.xrt"),
    "compile": lambda path: xrt.compile_model(MODEL, path, device="cpu", engine="onnxruntime"),
    "compile, overwrite": lambda path: xrt.compile_model(
        MODEL, path, device="cpu", engine="onnxruntime", overwrite=True
    ),
    "Report.save": lambda path: Report().save(path),
    "Report.save_html": lambda path: Report().save_html(path),
    "Report.load": Report.load,
    "compare_reports": lambda path: compare_reports(path, path),
    "Policy.load": lambda path: xrt.Policy.load(f"{path}.yaml"),
    "Policy.save": lambda path: xrt.Policy().save(f"{path}.yaml"),
    "policy=": lambda path: xrt.plan(MODEL, policy=f"{path}.yaml"),
    "machine": load_machine,
    "trace": lambda path: check_trace(f"{path}.json"),
    "profile": lambda path: xrt.profile(f"{path}.json").__enter__(),
    "calibration": lambda path: xrt.InferenceSession(
        MODEL, device="cpu", engine="onnxruntime", precision="int8", calibration=path
    ),
    "artifact cache": lambda path: xrt.InferenceSession(MODEL, policy=policy(f"{path}/c")),
    "tuning cache": tuning,
    "vendor's cache": lambda path: CacheFile(Path(path)).read() or CacheFile(Path(path)).update(lambda _: b"x"),
    "library": load_library,
    "log": read_choices,
}
PATHS = {
    "null": "a\0b",
    "long name": "a" * 300,
    "long path": "/".join(["a" * 200] * 40),
    "surrogate": "a\ud800b",
    "a file as a folder": "file/x",
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("call", CALLS)
def test_a_path_that_cannot_be_is_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("x")
    with pytest.raises(xrt.XpuRuntimeError):
        CALLS[call](PATHS[path])
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("path", ["", "/", ".", ".."])
@pytest.mark.parametrize("call", ["compile", "compile, overwrite", "Report.save", "Report.save_html", "Report.load"])
def test_a_path_without_a_name_is_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(xrt.InputError):
        CALLS[call](path)
    assert not list(tmp_path.iterdir())


def test_what_is_no_path_is_a_type_error() -> None:
    for value in (None, 3, b"bytes"):
        with pytest.raises(TypeError, match="the path of the report is a str or os"):
            user_path(value, "the report")  # type: ignore[arg-type]


@pytest.mark.parametrize("outputs", [{"file": 1}, {"allow_pickle": 1}, {"a/b": 1}, {"self": 1, "层": 2}])
def test_outputs_of_any_name_are_written(tmp_path: Path, outputs: dict[str, int]) -> None:
    save_outputs({name: np.full(3, value) for name, value in outputs.items()}, str(tmp_path / "o.npz"))
    with np.load(tmp_path / "o.npz") as found:
        assert {name: int(found[name][0]) for name in found.files} == outputs


def test_json_of_names_that_are_not_utf8() -> None:
    value = {"path": os.fsdecode(b"mod\xffel"), "层": ["\ud800", 1.5, None]}
    assert json.loads(json_bytes(value)) == {"path": "mod\\udcffel", "层": ["\\ud800", 1.5, None]}


@pytest.fixture(scope="module")
def strange(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose file name is not UTF-8, with names in it that Latin-1 and ASCII lack."""
    from onnx import TensorProto, helper

    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["层"], name="层")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4])],
        [helper.make_tensor_value_info("层", TensorProto.FLOAT, [1, 4])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path = tmp_path_factory.mktemp("strange") / os.fsdecode(b"mod\xffel.onnx")
    path.write_bytes(model.SerializeToString())
    return path


COMMANDS = {
    "plan": ["plan", "MODEL", "-d", "cpu"],
    "run": ["run", "MODEL", "-d", "cpu", "-e", "onnxruntime"],
    "explain": ["explain", "MODEL", "-d", "cpu", "-e", "onnxruntime", "-o", "r.json", "--html", "r.html"],
    "compile": ["compile", "MODEL", "-d", "cpu", "-e", "onnxruntime", "-o", "out.xrt", "--force"],
    "missing": ["plan", "层-\udcff.onnx"],
    "demo": ["demo"],
}
ENCODINGS = {
    "latin-1": {"PYTHONIOENCODING": "latin-1"},
    "ascii": {"PYTHONIOENCODING": "ascii"},
    "C": {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
    "utf-8": {"PYTHONIOENCODING": "utf-8"},
}


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="names of files are Unicode there")
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_command_prints_in_every_locale(strange: Path, tmp_path: Path, encoding: str) -> None:
    """All commands in one process each, as a terminal of that encoding gets them."""
    code = (
        "import json, os, sys\n"
        "from xpuruntime.cli.entry import _escape_what_streams_lack, run\n"
        "_escape_what_streams_lack()\n"
        "codes = []\n"
        "for command in json.loads(os.environ['COMMANDS']):\n"
        "    codes.append(run([os.fsdecode(os.environb[b'MODEL']) if word == 'MODEL' else word for word in command]))\n"
        "    sys.stdout.flush(); sys.stdout.buffer.write(b'\\0'); sys.stdout.flush()\n"
        "print(json.dumps(codes))\n"
    )
    listed = [[*command, *more] for command in COMMANDS.values() for more in ([], ["--json"])]
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith(("LC_", "LANG"))},
        **ENCODINGS[encoding],
        "COMMANDS": json.dumps(listed),
        "MODEL": str(strange),
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, env=environment, cwd=tmp_path, check=False
    )
    assert b"Traceback" not in done.stderr, done.stderr.decode(errors="replace")
    *printed, codes = done.stdout.split(b"\0")
    assert json.loads(codes) == [0, 0] * 4 + [2, 2] + [0, 0]
    for command, text in zip(listed, printed, strict=True):
        shown = text.decode("utf-8" if encoding == "utf-8" else "ascii" if encoding == "ascii" else "latin-1")
        if "--json" in command:
            assert json.loads(shown)
            assert encoding == "utf-8" or shown.isascii()
    Report.load(tmp_path / "r.json")
    (tmp_path / "r.html").read_text(encoding="utf-8")
