# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Exit codes: each kind of failure through every command that can meet it, and the table of the documentation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from xpuruntime import errors
from xpuruntime.cli.exit_codes import ExitCode, exit_code_of
from xpuruntime.policies import files

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "errors.md"

#: Commands that take a model and a policy, without what a failure adds.
COMMANDS: dict[str, tuple[str, ...]] = {
    "plan": (),
    "run": (),
    "bench": ("--runs", "1", "--warmup", "0"),
    "profile": ("--runs", "1"),
    "compile": ("--output", "OUT"),
    "compare": ("--runs", "1", "--no-search"),
    "explain": (),
    "verify": ("--only", "evidence"),
}
STRICT = "mode: strict\nexecution: {engine: onnxruntime, device: cpu}\nkernels: {matmul: cublas}\n"
INACCURATE = """
execution: {engine: onnxruntime, device: cpu, precision: fp16}
accuracy: {rtol: 1.0e-9, atol: 0.0}
"""
#: Kind of failure: the options that bring it, and its code.
FAILURES: dict[str, tuple[tuple[str, ...], ExitCode]] = {
    "an option that there is not": (("--nonsense",), ExitCode.BAD_INPUT),
    "a model that is missing": (("MISSING",), ExitCode.BAD_INPUT),
    "a model that is damaged": (("DAMAGED",), ExitCode.BAD_INPUT),
    "a policy that is missing": (("--policy", "nope.yaml"), ExitCode.BAD_INPUT),
    "an unknown key of a policy": (("--policy", "UNKNOWN"), ExitCode.BAD_INPUT),
    "a device that is no word": (("--device", "nonsense"), ExitCode.BAD_INPUT),
    "a CUDA device that is missing": (("--device", "cuda:99"), ExitCode.ENVIRONMENT),
    "an Intel NPU that is missing": (("--policy", "NPU"), ExitCode.ENVIRONMENT),
    "a key that is not enforced under strict": (("--policy", "STRICT"), ExitCode.NOT_HONOURED),
    "results out of tolerance": (("--policy", "INACCURATE"), ExitCode.NOT_HONOURED),
}
#: Commands that end otherwise: a plan runs nothing, and a comparison shows what cannot run as a row. A verification
#: has the same codes and shows what failed as a claim.
OTHERWISE = {
    ("plan", "results out of tolerance"): ExitCode.OK,
    ("compare", "a CUDA device that is missing"): ExitCode.NOT_HONOURED,
    ("compare", "an Intel NPU that is missing"): ExitCode.NOT_HONOURED,
}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_failure_has_the_same_code_in_every_command(
    xrt: Callable[..., Any], digits: str, tmp_path: Path, command: str, failure: str
) -> None:
    given, code = FAILURES[failure]
    if "NPU" in given:
        pytest.importorskip("openvino", reason="OpenVINO looks for the NPU")
    files = {
        "UNKNOWN": "execution: {engin: onnxruntime}\n",
        "NPU": "execution: {engine: openvino, device: npu}\n",
        "STRICT": STRICT,
        "INACCURATE": INACCURATE,
    }
    named = {"OUT": str(tmp_path / "made.xrt"), "MISSING": "", "DAMAGED": ""}
    for name, text in files.items():
        path = tmp_path / f"{name}.yaml"
        path.write_text(text)
        named[name] = str(path)
    model = digits
    if "MISSING" in given:
        model = str(tmp_path / "none.onnx")
    elif "DAMAGED" in given:
        damaged = tmp_path / "damaged.onnx"
        damaged.write_bytes(b"no model" * 20)
        model = str(damaged)
    more = ("--engines", "onnxruntime") if command == "compare" and "NPU" not in given else ()
    if command == "compare" and "NPU" in given:
        more = ("--engines", "openvino")
    arguments = [named.get(word, word) for word in (*COMMANDS[command], *given, *more)]
    result = xrt(command, model, *[word for word in arguments if word])
    assert result.code == OTHERWISE.get((command, failure), code), result.err
    if result.code == ExitCode.BAD_INPUT or (command not in ("compare", "verify") and result.code != ExitCode.OK):
        assert result.err.strip()
        assert not (tmp_path / "made.xrt").exists()


def test_the_table_is_that_of_the_code() -> None:
    """Every class of the error tree has a row, with the code that the command line exits with."""
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\|[^|]*\| (\d+) \|$", PAGE.read_text(encoding="utf-8"), re.M)
    classes = [name for name in errors.__all__ if name != "XpuRuntimeWarning"]
    assert sorted(name for name, _ in rows) == sorted(classes)
    for name, code in rows:
        assert exit_code_of(getattr(errors, name)("why")) == int(code), name


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError("full"), 3),
        (MemoryError(), 3),
        (ImportError("no torch", name="torch"), 3),
        (ImportError("no such module", name="xpuruntime.nothing"), 70),
        (ZeroDivisionError(), 70),
    ],
)
def test_codes_of_other_exceptions(error: Exception, code: int) -> None:
    assert exit_code_of(error) == code


#: What ends a command from within, and its code.
ENDS = {
    "Ctrl-C": (KeyboardInterrupt(), ExitCode.INTERRUPTED),
    "a closed pipe": (BrokenPipeError(), ExitCode.CLOSED_PIPE),
    "a bug": (ZeroDivisionError("a fault of ours"), ExitCode.BUG),
    "an exit that is not ours": (SystemExit(0), ExitCode.BUG),
    "what is no Exception": (GeneratorExit(), ExitCode.BUG),
    "a lock that does not hold": (errors.LockError("the lock names another kernel"), ExitCode.NOT_HONOURED),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("command", COMMANDS)
def test_what_ends_a_command_from_within_has_the_same_code_in_every_command(
    xrt: Callable[..., Any], digits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, end: str
) -> None:
    error, code = ENDS[end]

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(files, "load", fail)
    policy = tmp_path / "policy.yaml"
    policy.write_text("execution: {device: cpu}\n")
    path = tmp_path / "made.xrt"
    arguments = [str(path) if word == "OUT" else word for word in COMMANDS[command]]
    result = xrt(command, digits, "--policy", str(policy), *arguments)
    assert result.code == code, result.err
    assert ("this is a bug in xpuruntime" in result.err) == (code is ExitCode.BUG)
    assert not path.exists()
