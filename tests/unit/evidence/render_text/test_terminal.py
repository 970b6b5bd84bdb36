# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The report in a terminal."""

from __future__ import annotations

import io
import shlex

import msgspec
import pytest
from evidence_records import BOUNDARY, CONVERSION, LATENCY, control, unit
from rich.console import Console

import xpuruntime as xrt
from xpuruntime.engines.base import Observed
from xpuruntime.evidence import Report, build_report
from xpuruntime.evidence.render_text.terminal import plain_text
from xpuruntime.inference.comparison import Comparison, EngineRow
from xpuruntime.notebook import plain
from xpuruntime.tables import table


@pytest.fixture
def report():
    units = [
        unit("/model/layers.0/self_attn/q_proj/MatMul/" + "very_long" * 12, time=400.0),
        unit("conv", op="Conv", time=100.0, relation="fused", source_nodes=("conv", "bn", "relu")),
        unit("half", asked="fp16", ran="fp32", status="substituted", time=50.0),
        unit("cast", op="Cast", relation="inserted", ran="fp16->fp32", asked=None, time=25.0),
        unit("step", op="Exp", relation="inserted", serves=("softmax",), time=25.0),
        unit("[bold]odd[/bold]", op="Odd", time=30.0),
        *(unit(f"n{i}", time=1.0) for i in range(20)),
        unit("folded", relation="folded", device="none", time=None),
    ]
    observed = Observed(units=tuple(units), boundaries=(BOUNDARY,), notes=("a note [with] brackets",))
    return build_report(
        {"engine": "onnxruntime", "device": "cpu", "precision": "model"},
        [
            control("kernels.attention", "flash_v2", "sdpa_kernel=1"),
            control("kernels.matmul", "cublasLt", "-", "unsupported", "there is no switch for it"),
            control("execution.provider_options.onnxruntime", "{" + "'key': 'value', " * 9 + "}"),
        ],
        observed,
        conversions=[CONVERSION],
        latency=LATENCY,
        memory={"weights": 3 << 20},
        command="xrt explain model.onnx",
    )


def test_what_it_tells(report):
    text = str(report)
    assert text.startswith("2 deviations; 2 of 6 keys could not be observed")
    for words in (
        "median 120.5 us",
        "asked, resolved, observed",
        "kernels.attention",
        "substituted: execution.precision:",
        "unsupported: kernels.matmul: there is no switch for it",
        "where the time goes: 650.0 (us, wall time; of 5 instrumented runs)",
        "conv + 2 more",
        "a step of",
        "16 others",
        "precision",
        "no: 1",
        "cuda:0 -> cpu",
        "4.8 MiB",
        "3.0 MiB",
        "input 'x' was not C-contiguous",
        "- a note [with] brackets",
        "xrt explain model.onnx",
        "[bold]odd",
        "27 source nodes ran as 26 units: 23 exact, 3 fused into 1, 1 folded, 2 units inserted",
    ):
        assert words in text or words in plain_text(report, 200), words


def test_the_time_that_no_unit_has(report):
    assert "outside of units" not in plain_text(report, 200)
    detail = {"instrumented": {"run_us": 700.0, "runs": 5, "coverage": 0.93, "outside_us": 48.75}}
    known = msgspec.structs.replace(report, latency=msgspec.structs.replace(LATENCY, detail=detail))
    row = next(line for line in plain_text(known, 200).splitlines() if "outside of units" in line)
    assert row.split() == ["outside", "of", "units", "48.8"]


@pytest.mark.parametrize("width", [40, 80, 120])
def test_it_fits_the_width(report, width):
    assert max(len(line) for line in plain_text(report, width).splitlines()) <= width


@pytest.mark.parametrize("width", [40, 80, 120])
def test_tables_of_long_words_lose_no_text(width: int) -> None:
    shown = table("", ("KEY", "SEEN", "WHY"))
    shown.add_row("k" * 31, "s" * 50, "w" * 90)
    text = plain(shown, width)
    assert [text.count(letter) for letter in "ksw"] == [31, 50, 90]
    assert max(map(len, text.splitlines())) <= width


LONG = "/model/layers.0/self_attn/q_proj/MatMul_" + "very_long_" * 3


@pytest.mark.parametrize("texts", [1, 3, 5])
@pytest.mark.parametrize("name", ["y", LONG])
def test_numbers_statuses_and_keys_are_whole_and_columns_give_way(texts: int, name: str) -> None:
    solid = ("evidence.execution.precision", "unobservable", "1,167.25 us", "2.36e-07")
    columns = ("claim", "status", ">time", ">max rel", *(f"?text{index}" for index in range(texts)))
    shown = table("", columns)
    shown.add_row(*solid, *[name] * texts)
    text = plain(shown, 80)
    assert max(map(len, text.splitlines())) <= 80
    for word in (*solid, "claim", "status", "time", "max rel"):
        assert any(word in line for line in text.splitlines()), word
    for index in range(texts):
        assert text.count(f"text{index}") == 1, "a column is shown, or is named as left out"
    assert plain(shown, 1000).splitlines()[-1].split() == " ".join((*solid, *[name] * texts)).split()


def test_a_comparison_shows_each_number_in_one_piece() -> None:
    rows = tuple(
        EngineRow(
            engine=engine, device="cpu", precision="model", status=status, reason="why",
            max_abs=1.67e-6, max_rel=2.36e-7, cosine=0.99999, median_us=114.8,
        )
        for engine, status in (("openvino_genai", "agrees"), ("torch", "inconclusive"))
    )  # fmt: skip
    compared = Comparison(model="model.onnx", reference="onnxruntime.cpu.fp32", inputs="generated (seed 0)", rows=rows)
    for width in (60, 80):
        lines = plain(compared.__rich__(), width).splitlines()
        for status in ("agrees", "inconclusive"):
            (line,) = (line for line in lines if line.endswith(status) and "1.67e-06" in line)
            assert all(number in line for number in ("1.67e-06", "2.36e-07", "0.99999", "114.8 us")), line


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_command_can_be_pasted_into_a_shell(width: int) -> None:
    words = ["xrt", "explain", "a model.onnx", "--policy", "ünï.yaml", "--input", 'x=["a", "b"]', "--device", "cpu"]
    report = Report(command=shlex.join(words))
    told = plain_text(report, width).partition("reproduce: ")[2]
    assert shlex.split(told.replace("\\\n", "")) == words
    assert all(len(line.rstrip()) <= width for line in told.splitlines())


def test_a_command_that_no_shell_reads_is_shown_as_it_is() -> None:
    assert "reproduce: xrt explain 'cut off" in plain_text(Report(command="xrt explain 'cut off"))


def test_colour_says_nothing_alone(report):
    """The same words stand in the colored form and in the plain one."""
    stream = io.StringIO()
    Console(file=stream, width=80, force_terminal=True, color_system="truecolor", legacy_windows=False).print(report)
    coloured = stream.getvalue()
    assert "\x1b[" in coloured
    from rich.text import Text

    plain = [line.rstrip() for line in Text.from_ansi(coloured).plain.splitlines()]
    assert "\n".join(plain).strip() == str(report).strip()


def test_an_empty_report():
    assert str(Report()) == "policy honoured"
    assert str(Report(partial=True, notes=("nothing ran",))).startswith(
        "policy honoured as far as observed\nincomplete"
    )


def test_what_prints_as_tables_is_shown_in_notebooks_as_tables() -> None:
    """Everything in it is text, whatever is in the names."""
    hostile = "<img src=x onerror=alert(1)>"
    report = build_report({}, [], Observed(units=(unit(hostile, op="Conv", time=80.0),)))
    other = build_report({}, [], Observed(units=(unit(hostile, op="Conv", time=8.0, ran="fp16"),)))
    with xrt.profile(devices=False) as prof, prof.range(hostile):
        pass
    compared = xrt.Comparison(model=hostile, reference="onnxruntime", inputs="given", rows=())
    for shown in (xrt.compare_reports(report, other), prof.result, compared):
        text = shown._repr_html_()
        assert text.startswith("<div class='xrt-report'>")
        assert "<table>" in text
        assert "<img" not in text
        assert "&lt;img" in text
