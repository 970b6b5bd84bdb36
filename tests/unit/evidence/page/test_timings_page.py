# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The page of a benchmark in a real browser."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xpuruntime.evidence.page.document import render_timings

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

HOSTILE = "<b id='bad'>x</b>.json"


class Page:
    """The page of a benchmark, as reports save theirs."""

    def __init__(self, text: str) -> None:
        self.text = text

    def save_html(self, path: Path) -> Path:
        path.write_text(self.text, encoding="utf-8")
        return path


def result(**samples: list[float]) -> dict[str, Any]:
    facts = dict.fromkeys(("engine", "engine_version", "device", "precision", "cuda_graph"), HOSTILE)
    latency = {call: {"median_us": values[0]} for call, values in samples.items()}
    return {"model": "m.onnx", "samples_us": samples, "latency": latency, "warnings": ["noisy"], **facts}


def near(value: float, runs: int = 50) -> list[float]:
    return [value * (1 + 0.001 * (run % 10 - 4.5)) for run in range(runs)]


def page() -> Page:
    return Page(render_timings(result(run=near(20.0), bind=near(10.0)), [("b.json", result(run=near(10.0)))]))


def test_each_run_is_a_point_and_medians_stand_against_the_baseline(look: Callable[..., Any]) -> None:
    now, earlier = result(run=near(20.0), bind=near(10.0, 5)), result(run=near(10.0), bind=near(10.0))
    browser = look(Page(render_timings(now, [(HOSTILE, earlier), ("c.json", result(run=near(11.0), bind=near(9.0)))])))
    number = "document.querySelectorAll('{}').length"
    assert browser.evaluate(number.format("#runs circle")) == 50 + 5 + 4 * 50
    named = "[...document.querySelectorAll('#ratios .intervals .name')].map(e => e.textContent)"
    assert browser.evaluate(named) == ["run", "c.json: run", "c.json: bind"], "bind has too few runs for an interval"
    told = browser.evaluate("document.querySelector('#ratios .intervals li').innerText")
    assert "2.000 [1.992, 2.008]" in told
    cells = "[...document.querySelectorAll('#figures tbody tr')].map(row => row.cells[2].textContent)"
    assert browser.evaluate(cells)[1] == "too few runs"
    assert browser.evaluate(number.format("#bad")) == 0


def test_of_many_runs_some_are_drawn_and_their_number_is_said(look: Callable[..., Any]) -> None:
    browser = look(Page(render_timings(result(run=near(20.0, 5000)), [])))
    assert browser.evaluate("document.querySelectorAll('#runs circle').length") == 1000
    assert "1,000 of 5,000" in browser.evaluate("document.querySelector('#runs .hint').innerText")
    assert browser.evaluate("document.querySelector('#ratios').hidden")
