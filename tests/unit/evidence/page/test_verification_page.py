# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The page of a verification in a real browser."""

from __future__ import annotations

import msgspec

from xpuruntime.locks.verification.claims import Claim, ClaimCode
from xpuruntime.locks.verification.result import VerificationResult

HOSTILE = "<b id='bad'>x</b> \x1b[31m"


def result() -> VerificationResult:
    rows = [("evidence.execution.engine", "pass"), ("accuracy.logits", "fail"), ("speed.latency.p50", "inconclusive")]
    claims = [
        Claim(
            id=id, section=id.partition(".")[0], requested=HOSTILE, observed="seen", verdict=verdict,
            code=ClaimCode.SUBSTITUTED, reason=HOSTILE, fix="do this", figures={"ratio": 1.25}, key="a",
            line=7, column=3,
        )
        for id, verdict in rows
    ]  # fmt: skip
    return VerificationResult(model="m.onnx", policy="p.yaml", claims=tuple(claims), facts={"load": "1"}, notes=("n",))


def test_claims_are_shown_the_worst_first_and_open_on_a_click(look):
    browser = look(result())
    cells = "[...document.querySelectorAll('#claims tbody tr')].map(r => r.cells[1].textContent)"
    assert browser.evaluate(cells) == ["accuracy.logits", "speed.latency.p50", "evidence.execution.engine"]
    assert browser.evaluate("document.querySelector('h1').innerText").endswith("1 failed, 1 inconclusive, 1 passed")
    browser.evaluate("document.querySelector('#claims tbody tr button').click()")
    told = browser.evaluate("document.querySelector('#claims .hint').innerText")
    assert "p.yaml:7:3" in told
    assert "1.25" in told
    assert "<b id='bad'>" in told
    assert browser.evaluate("document.querySelector('#bad')") is None
    assert "do this" in browser.evaluate("document.querySelector('#reasons').innerText")


def test_figures_stand_beside_their_limits(look):
    facts = {
        "speed.latency.p50": {"ratio": 1.02, "low": 0.99, "high": 1.05, "margin": 0.1, "rounds": 20.0},
        "memory.locked_peak": {"peak_bytes": 3 << 20, "locked_bytes": 2 << 20, "limit_bytes": 5 << 19},
        "start": {"seconds": 0.5, "limit_seconds": 2.0},
    }
    claims = [
        msgspec.structs.replace(result().claims[0], id=id, observed=id, figures=figures)
        for id, figures in facts.items()
    ]
    browser = look(VerificationResult(model="m.onnx", policy="p.yaml", claims=tuple(claims)))
    edges = "[...document.querySelectorAll('#limits .track .{}')].map(part => part.getBoundingClientRect().x)"
    points, limits, base = (browser.evaluate(edges.format(part)) for part in ("dot", "limit", "base"))
    order = browser.evaluate("[...document.querySelectorAll('#limits .intervals .name')].map(e => e.textContent)")
    for at, id in enumerate(order):
        assert (points[at] + 5 > limits[at]) == (id == "memory.locked_peak")
        assert (points[at] + 5 > base[at]) == (id != "start")


def test_a_verification_without_such_figures_says_so_once(look):
    browser = look(result())
    assert browser.evaluate("document.querySelector('#limits').hidden")
    assert "Limits: No claim has" in browser.evaluate("document.querySelector('#notes').innerText")
