# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The page of a search in a real browser."""

from __future__ import annotations

from xpuruntime.tuning.tune_result import CandidateResult, Ratio, TuneResult

HOSTILE = "<b id='bad'>x</b> \x1b[31m"


def result() -> TuneResult:
    gain = Ratio(value=1.31, low=1.28, high=1.34, against="c0", rounds=12)
    facts = {"engine": "onnxruntime", "device": "cpu", "start": 0.5, "cosine": 1.0}
    rows = (
        CandidateResult(
            id="c0", changes={}, code="control", reason="given", figure=2e-3, memory=1 << 27, error=0.0, **facts
        ),
        CandidateResult(
            id="c1", changes={"execution.threads": 1}, code="winner", reason="won", figure=1.5e-3, gain=gain,
            memory=1 << 26, error=1e-6, **facts,
        ),
        CandidateResult(id="c2", changes={"execution.engine": HOSTILE}, code="inaccurate", reason=HOSTILE, **facts),
    )  # fmt: skip
    return TuneResult(
        model="m.onnx", objective="latency.p50", verdict="winner", reason="c1 won", winner="c1", gain=gain,
        policy={"execution": {"threads": 1}}, min_effect=0.02, confidence=0.99, candidates=rows, front=("c0", "c1"),
        notes=("the load was 7",),
    )  # fmt: skip


def test_candidates_are_shown_with_their_reasons_and_the_front(look):
    browser = look(result())
    assert browser.evaluate("document.querySelector('h1').innerText").endswith("1.31x [1.28, 1.34] faster")
    cells = "[...document.querySelectorAll('#candidates tbody tr')].map(r => r.cells[0].textContent)"
    assert browser.evaluate(cells) == ["c1", "c0", "c2"]
    assert browser.evaluate("document.querySelectorAll('#front circle').length") == 4
    assert browser.evaluate("document.querySelectorAll('#gains .track .whisker').length") == 1
    assert browser.evaluate("document.querySelectorAll('#front .control').length") == 2
    left = "document.querySelector('#gains .track .{}').getBoundingClientRect().x"
    assert (
        browser.evaluate(left.format("base"))
        < browser.evaluate(left.format("limit"))
        < browser.evaluate(left.format("whisker"))
    )
    assert "threads: 1" in browser.evaluate("document.querySelector('#found pre').textContent")
    browser.evaluate("[...document.querySelectorAll('#candidates tbody tr button')].pop().click()")
    told = browser.evaluate("document.querySelector('#candidates .hint').innerText")
    assert "<b id='bad'>" in told
    assert browser.evaluate("document.querySelector('#bad')") is None
    assert "the load was 7" in browser.evaluate("document.querySelector('#notes').innerText")
