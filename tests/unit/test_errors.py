# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Errors carry reason and fix as values beside their text, and any exception is shown in one line."""

from __future__ import annotations

import linecache
import pickle
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import xpuruntime as xrt
from xpuruntime import errors
from xpuruntime.error_text import error_line, first_line

if TYPE_CHECKING:
    from collections.abc import Callable

SOURCE = Path(__file__).parents[2] / "src" / "python" / "xpuruntime"


@pytest.mark.parametrize("kind", [errors.InputError, errors.EngineUnavailable, errors.LockError])
@pytest.mark.parametrize("message", ["the file is missing", "the file is missing."])
def test_reason_and_fix_are_values(kind: type[errors.XpuRuntimeError], message: str) -> None:
    error = kind(message, fix="name\x1banother")
    assert (error.reason, error.fix) == ("the file is missing", r"name\u001banother")
    assert str(error) == r"the file is missing. Fix: name\u001banother"
    again = pickle.loads(pickle.dumps(error))
    assert (again.reason, again.fix, str(again)) == (error.reason, error.fix, str(error))
    plain = kind(message)
    assert (plain.reason, plain.fix, str(plain)) == ("the file is missing", None, message)


@pytest.mark.parametrize(
    ("error", "line", "named"),
    [
        (AssertionError(), "AssertionError", "AssertionError"),
        (RuntimeError(" \n\t\n"), "RuntimeError", "RuntimeError"),
        (RuntimeError("\n  what is wrong \nwhere"), "what is wrong", "RuntimeError: what is wrong"),
        (ValueError("what is wrong\r\nwhere"), "what is wrong", "ValueError: what is wrong"),
        (KeyError(""), "''", "KeyError: ''"),
    ],
)
def test_the_line_of_an_exception(error: BaseException, line: str, named: str) -> None:
    assert (error_line(error), error_line(error, named=True)) == (line, named)
    assert first_line(str(error)) == (line if str(error).strip() else "")


def warned_at(call: Callable[[], Any]) -> list[tuple[str, str]]:
    """Return the file and the line of each warning of a call."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        call()
    return [(entry.filename, linecache.getline(entry.filename, entry.lineno).strip()) for entry in told]


def test_a_warning_points_at_the_line_of_the_user(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    asked: dict[str, Any] = {"device": "cpu", "engine": "onnxruntime", "precision": "fp16"}
    model = xrt.demo_model_path()

    def opened() -> None:
        xrt.InferenceSession(model, **asked).close()

    def locked() -> None:
        xrt.lock(model, **asked)

    def compiled() -> None:
        xrt.compile_model(model, tmp_path / "digits.xrt", **asked)

    for call, line in ((opened, "xrt.InferenceSession("), (locked, "xrt.lock("), (compiled, "xrt.compile_model(")):
        places = warned_at(call)
        assert places
        assert {file for file, _ in places} == {__file__}
        assert all(text.startswith(line) for _, text in places), places


@pytest.mark.torch
def test_a_warning_of_training_points_at_the_line_of_the_user() -> None:
    torch = pytest.importorskip("torch")
    import xpuruntime.pytorch as xt

    net = torch.nn.Sequential(torch.nn.Linear(8, 8))
    rules = [{"match": {"module": "nowhere", "op": "matmul"}, "use": "cpu.blas"}]

    def trained() -> None:
        with xt.kernel_policy({"kernels": {"rules": rules}}, root=net):
            net(torch.ones(2, 8))

    places = warned_at(trained)
    assert places
    assert {file for file, _ in places} == {__file__}


def test_every_warning_of_ours_points_there() -> None:
    own = [path for path in SOURCE.rglob("*.py") if "XpuRuntimeWarning, stacklevel" in path.read_text(encoding="utf-8")]
    assert own == []
