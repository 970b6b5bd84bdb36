# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Names of models, policies and reports never reach a terminal, a page or an error with their control characters."""

from __future__ import annotations

import io
import json
import re
from typing import TYPE_CHECKING

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import xpuruntime
from xpuruntime.errors import ModelError, XpuRuntimeWarning
from xpuruntime.notebook import plain
from xpuruntime.printable import escape_console, printable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import Result

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202eno\x7f \u2066deviations"
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def test_printable() -> None:
    assert printable("é 가중치 🙂 a\tb\nc \u2028 \u200d") == "é 가중치 🙂 a\tb\nc \u2028 \u200d"
    assert printable("\x1b[2J\r\x9b\u202e\ud800") == "\\u001b[2J\\u000d\\u009b\\u202e\\ud800"
    everything = "".join(map(chr, range(0x3000)))
    assert not CONTROLS.search(printable(everything))
    assert json.loads('"' + printable("\x1b\u202e\x9b") + '"') == "\x1b\u202e\x9b"


def test_errors_and_warnings() -> None:
    assert str(ModelError(f"cannot use {EVIL}")) == f"cannot use {printable(EVIL)}"
    assert str(XpuRuntimeWarning(EVIL)) == printable(EVIL)
    assert ModelError("plain", engine="null").engine == "null"


def test_consoles_keep_their_own_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    stream = io.StringIO()
    console = escape_console(
        Console(file=stream, force_terminal=True, color_system="standard", width=200, markup=False)
    )
    console.print(Text.assemble(("red", "red"), EVIL))
    table = Table(EVIL)
    table.add_row(EVIL)
    console.print(table)
    shown = re.sub(r"\x1b\[[\d;]*m", "", stream.getvalue())
    assert "\x1b[31mred" in stream.getvalue()
    assert not CONTROLS.search(shown)
    assert "\\u001b" in shown
    assert not CONTROLS.search(plain(table))
    assert "[red]not[/blue]" in plain(Text("[red]not[/blue]"))


@pytest.fixture
def evil_model(tmp_path: Path) -> Path:
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x" + EVIL, "w" + EVIL], ["m" + EVIL], name="mm" + EVIL),
            helper.make_node("Relu", ["m" + EVIL], ["y" + EVIL], name="relu" + EVIL),
        ],
        "g" + EVIL,
        [info("x" + EVIL, 1, ["N", 8])],
        [info("y" + EVIL, 1, ["N", 4])],
        [numpy_helper.from_array(np.ones((8, 4), np.float32), "w" + EVIL)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8, producer_name=EVIL)
    path = tmp_path / "m.onnx"
    onnx.save(model, str(path))
    return path


#: Lines of commands; "MODEL" stands for the model and "REPORT" for its report.
COMMANDS = (
    "plan MODEL",
    "plan MODEL --json",
    "run MODEL --dim N=1",
    "run MODEL --dim N=1 --json",
    "run MODEL --input q=1",
    "run MODEL --dim q=1",
    "explain MODEL --dim N=1 --device cpu --engine onnxruntime",
    "explain MODEL --dim N=1 --device cpu --engine onnxruntime --json",
    "explain REPORT",
    "explain REPORT --html PAGE",
    "explain REPORT REPORT --html PAGE",
    "bench MODEL --dim N=1 --runs 2",
    "profile MODEL --dim N=1 --runs 1",
    "compare MODEL --dim N=1",
    "compile MODEL --engine onnxruntime --output OUT.xrt",
    "policy validate POLICY",
    f"plan MODEL --engine {EVIL}",
    f"plan {EVIL}",
    f"kernels {EVIL}",
    f"{EVIL}",
)


@pytest.mark.parametrize("line", COMMANDS, ids=printable)
@pytest.mark.filterwarnings("ignore::xpuruntime.errors.XpuRuntimeWarning")
def test_commands(xrt: Callable[..., Result], evil_model: Path, tmp_path: Path, line: str) -> None:
    page, policy = tmp_path / "page.html", tmp_path / "p.json"
    policy.write_text(json.dumps({"schema": EVIL, EVIL: 1}), encoding="utf-8")
    words = {"MODEL": evil_model, "PAGE": page, "OUT.xrt": tmp_path / "out.xrt", "POLICY": policy}
    if "REPORT" in line:
        words["REPORT"] = tmp_path / "r.json"
        with xpuruntime.InferenceSession(evil_model, device="cpu", engine="onnxruntime") as session:
            report = session.explain(runs=1)
        report.save(words["REPORT"])
        for text in (str(report), report._repr_html_(), report.to_html(), str(session.plan)):
            assert not CONTROLS.search(text)
    result = xrt(*(words.get(word, word) for word in line.split(" ")))
    assert result.code != 70
    assert result.out + result.err
    assert not CONTROLS.search(result.out + result.err)
    if "--json" in line:
        assert "\x1b" in json.dumps(result.json(), ensure_ascii=False) or "\\u001b" in result.out
    if page.exists():
        assert not CONTROLS.search(page.read_text(encoding="utf-8"))
