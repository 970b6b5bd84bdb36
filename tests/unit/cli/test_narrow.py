# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Plans and reports in a terminal of 80 columns: no key or status is broken, and settings are what the engine gets."""

from __future__ import annotations

import io
import re
import warnings
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from rich.console import Console

import xpuruntime as xrt
from xpuruntime.cli.output import console, error_line, on_screen, print_and_save, working
from xpuruntime.cli.results import rendered
from xpuruntime.runtime.doctor.diagnosis import diagnose
from xpuruntime.runtime.telemetry import log_step
from xpuruntime.tables import table

if TYPE_CHECKING:
    from pathlib import Path

KEYS = (
    "execution.determinism",
    "execution.memory.pool",
    "execution.memory.limit",
    "kernels.matmul",
    "kernels.rules[0]",
)


@pytest.fixture
def policy() -> dict[str, Any]:
    rule = {"match": {"op": "matmul", "m": "<=16", "dtype": "bf16"}, "use": "cuda_raw.skinny"}
    return {
        "execution": {"device": "cpu", "determinism": "run_to_run", "memory": {"pool": "caching", "limit": "8GiB"}},
        "kernels": {"matmul": "cublasLt", "rules": [rule]},
    }


def shown(thing: Any) -> str:
    stream = io.StringIO()
    Console(file=stream, width=80, color_system=None, highlight=False, legacy_windows=False).print(thing)
    return stream.getvalue()


def test_keys_and_words_are_whole(digits: str, policy: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", xrt.XpuRuntimeWarning)
        session = xrt.InferenceSession(digits, policy=policy)
    with session:
        plan, report = shown(session.plan), shown(session.explain(runs=1))
    for text in (plan, report):
        assert max(map(len, text.splitlines())) <= 80
        for key in KEYS:
            assert any(key in line for line in text.splitlines()), key
    for line in report.splitlines():
        if line.strip().startswith(KEYS):
            assert line.split()[-1] in {"honoured", "unsupported", "unobservable"}, line


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.filterwarnings("ignore::xpuruntime.XpuRuntimeWarning")
def test_a_terminal_shows_a_report_on_one_screen_and_a_pipe_all_of_it(
    digits: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with xrt.InferenceSession(digits, device="cpu", engine="onnxruntime", precision=precision) as session:
        report = session.explain(runs=1)
    assert shown(rendered(report, summary=False)) == shown(report)
    monkeypatch.setattr("sys.stdout", _Terminal())
    monkeypatch.setenv("TERM", "xterm-256color")
    lines = shown(rendered(report, summary=False)).splitlines()
    assert lines[0].startswith(report.headline)
    assert len(lines) <= 40
    assert len(shown(rendered(report, summary=True)).splitlines()) < len(lines)
    assert any("execution.precision" in line for line in lines)
    assert any("conv2" in line for line in lines)


def test_colors_that_are_forced_make_no_terminal_of_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as jobs set it, whose logs are to have all of it
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert not on_screen()
    assert console().color_system is not None
    assert console().width > 1000
    monkeypatch.setattr("sys.stdout", _Terminal())
    assert on_screen()


def test_a_row_in_a_pipe_is_a_line_and_long_texts_are_below_it(capsys: pytest.CaptureFixture[str]) -> None:
    shown_table = table("candidates", ("candidate", ">us", "reason", "place"))
    path = "/data/models/" + "a" * 60
    shown_table.add_row("onnxruntime@cpu", "12.5", "runs", path)
    shown_table.add_row("tensorrt@cuda:0", "1,234.0", f"{'not found ' * 20}\nfix: pip install x", "model.onnx")
    console().print(shown_table)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[1:3]] == [["candidates"], ["candidate", "us", "reason", "place"]]
    assert lines[4].split() == ["onnxruntime@cpu", "12.5", "runs", path]
    assert lines[5].split() == ["tensorrt@cuda:0", "1,234.0", "model.onnx"]
    assert lines[6].strip() == f"reason: {'not found ' * 20}".strip()
    assert lines[7:] == ["     fix: pip install x"]
    assert max(map(len, lines[:6])) <= 140
    assert not any(line.endswith(" ") for line in lines[:6])


def test_a_plan_and_a_diagnosis_begin_with_what_was_found(digits: str) -> None:
    plan = xrt.plan(digits, device="cpu", engine="onnxruntime")
    assert shown(plan).splitlines()[0].rstrip() == "onnxruntime@cpu runs it: precision model, mode prefer"
    diagnosis = diagnose()
    assert (shown(diagnosis).splitlines()[0].rstrip() == "no problem found") == (
        not any(finding.severity != "info" for finding in diagnosis.findings)
    )


@pytest.mark.filterwarnings("ignore::xpuruntime.XpuRuntimeWarning")
def test_first_answers_fit_a_screen_and_begin_with_what_was_found(
    digits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    strict = {"mode": "strict", "execution": {"engine": "onnxruntime", "device": "cpu", "precision": "fp32"}}
    asked: dict[str, Any] = {"device": "cpu", "engine": "onnxruntime", "precision": "fp16"}
    answers = {
        "onnxruntime@cpu runs it": xrt.plan(digits, strict),
        "of 2 engines, 1 differs": xrt.compare_engines(digits, ["onnxruntime", "null"], device="cpu", runs=1),
        "a.lock: written, with 1 deviation": xrt.lock(digits, output="a.lock", **asked),
        "1 failed": xrt.verify(digits, only=["evidence"], **asked),
    }
    for words, answer in answers.items():
        stream = io.StringIO()
        Console(file=stream, width=100, color_system=None, highlight=False, legacy_windows=False).print(answer)
        lines = stream.getvalue().splitlines()
        assert lines[0].startswith(words)
        assert len(lines) <= 40, words


def test_the_cpu_is_given_no_pool(digits: str, policy: dict[str, Any]) -> None:
    settings = xrt.plan(digits, policy=policy).settings
    assert (settings["pool"], settings["pool_limit"]) == ("engine", None)


@pytest.mark.parametrize("columns", [40, 80])
def test_an_error_fits_a_terminal_and_its_fix_can_be_pasted(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    command = "`xrt lock retrained.onnx -o model.lock --accept model --accept output --why TEXT`"
    pasted = "pip install --no-deps 'onnxruntime-qnn==1.24.3' 'xpuruntime[openvino,tensorrt]'"
    missing = f"  a@cpu: it {'is missing ' * 9}. Fix: use {command} there"
    text = f"{'nothing can run it ' * 9}\n{missing}\n  b: no. Fix: {pasted}"
    stream = _Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(columns))
    error_line(text)
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()).splitlines()
    assert lines[0].startswith("error: nothing can run it")
    assert any(command in line for line in lines)
    assert f"    Fix: {pasted}" in lines
    assert all(len(line) <= columns or command in line or pasted in line for line in lines)
    assert " ".join(" ".join(lines).split()) == f"error: {' '.join(text.split())}"
    piped = io.StringIO()
    monkeypatch.setattr("sys.stderr", piped)
    error_line(text)
    assert piped.getvalue() == f"error: {text}\n"


def test_a_result_fits_a_terminal_and_its_fix_can_be_pasted(digits: str, monkeypatch: pytest.MonkeyPatch) -> None:
    held = xrt.plan(digits, device="cpu", engine="onnxruntime")
    fix = f"`xrt lock {'m' * 60}.onnx -o model.lock --accept model`"
    result = msgspec.structs.replace(held, notes=(f"{'it moved ' * 12}as {fix} says {'at last ' * 12}",))
    stream = _Terminal()
    monkeypatch.setattr("sys.stdout", stream)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    print_and_save(result, as_json=False)
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()).splitlines()
    assert any(fix in line for line in lines)
    assert all(len(line) <= 80 or fix in line for line in lines)
    note = next(index for index, line in enumerate(lines) if line.startswith("note: it moved"))
    assert all(line.startswith("  ") for line in lines[note + 1 :])


def test_a_warning_does_not_end_up_behind_a_spinner(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = _Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("TERM", "xterm-256color")
    with working("planning", as_json=False):
        error_line("mind this", label="warning")
    before = stream.getvalue().partition("warning: ")[0].replace("\x1b[2K", "\n").replace("\r", "\n")
    assert "warning: " in stream.getvalue()
    assert re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", before).rpartition("\n")[2] == "", "the spinner was not cleared"


def test_a_spinner_names_the_step_and_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = _Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("TERM", "xterm-256color")
    with working("verifying", as_json=False):
        log_step("[bold]speed", 2, 3, 20.0)
    log_step("nobody looks", 3, 3)
    assert "verifying: [bold]speed (2 of 3, about 20 s left)" in stream.getvalue()
    assert "nobody looks" not in stream.getvalue()


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True
