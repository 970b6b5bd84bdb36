# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Pages of indexes, searches, servers, benchmarks and verifications in a real browser."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from xpuruntime.demo import demo_model_path
from xpuruntime.evidence.page.document import render_timings
from xpuruntime.locks.folder_index import FolderIndex, IndexedFile, OddFact
from xpuruntime.locks.verification.claims import Claim, ClaimCode
from xpuruntime.locks.verification.result import VerificationResult
from xpuruntime.serving.messages import InferRequest, InferTensor
from xpuruntime.serving.models.service import Models
from xpuruntime.serving.models.settings import ServeSettings
from xpuruntime.serving.monitoring.pages import status_page
from xpuruntime.tuning.tune_result import CandidateResult, Ratio, TuneResult

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


HOSTILE = "<b id='bad'>x</b>"


def index() -> FolderIndex:
    fact = OddFact(name="packages.onnx", value=HOSTILE, usual="1.0", agreeing=2, of=3)
    files = [IndexedFile(path=f"a b/{name}.json", kind="report", model="m.onnx", headline="h") for name in "yz"]
    odd = IndexedFile(path=f"{HOSTILE}.json", kind="report", model="m.onnx", good=False, odd=(fact,))
    return FolderIndex(folder="fleet", files=(odd, *files), undecided=("lock of n.onnx: engine",))


def test_odd_facts_and_files_are_shown_as_text_with_links(look):
    browser = look(index())
    assert browser.evaluate("document.querySelector('h1').innerText").endswith("3 files, 1 odd")
    cells = "[...document.querySelectorAll('#odd tbody tr td')].map(cell => cell.textContent)"
    assert browser.evaluate(cells) == [f"{HOSTILE}.json", "m.onnx", "packages.onnx", HOSTILE, "1.0 (2 of 3)"]
    assert browser.evaluate("document.querySelector('#bad')") is None
    links = "[...document.querySelectorAll('#files a')].map(link => link.getAttribute('href'))"
    assert browser.evaluate(links)[1:] == ["./a%20b/y.json", "./a%20b/z.json"]
    assert "lock of n.onnx: engine" in browser.evaluate("document.querySelector('#odd').innerText")
    assert browser.evaluate("document.querySelector('#against')") is None
    assert len(browser.evaluate("[...document.querySelectorAll('#files tbody tr')].map(row => row.rowIndex)")) == 3


def test_units_that_no_other_file_has_are_one_fact(look):
    own = [OddFact(name=f"unit cast{i}", value=f"Cast {HOSTILE}", usual="nothing", agreeing=2, of=3) for i in range(20)]
    fact = OddFact(name="precision", value="fp16", usual="model", agreeing=2, of=3)
    few = IndexedFile(path="few.json", kind="report", model="m.onnx", odd=(*own[:2],))
    browser = look(FolderIndex(folder=".", files=(few, IndexedFile(path="o.json", kind="report", odd=(fact, *own)))))
    facts = "[...document.querySelectorAll('#odd tbody tr')].map(row => row.cells[2].textContent)"
    assert browser.evaluate(facts) == ["unit cast0", "unit cast1", "precision", "20 units of its own"]
    listed = browser.evaluate("[...document.querySelectorAll('#odd details li')].map(item => item.textContent)")
    assert listed == [f"cast{i}: Cast {HOSTILE}" for i in range(20)]
    assert browser.evaluate("document.querySelector('#odd summary').textContent") == "cast0, cast1, …"


def test_reports_are_held_against_a_baseline(look):
    base = IndexedFile(path="a.json", kind="report", engine="e", device="cpu", median_us=2000.0)
    other = IndexedFile(
        path="b.json", kind="report", engine="f", device="cpu", median_us=3000.0, changes=f"1 node moved {HOSTILE}",
        same=False,
    )  # fmt: skip
    browser = look(FolderIndex(folder=".", files=(base, other), baseline="a.json"))
    assert browser.evaluate("document.querySelector('h1').innerText").endswith("1 of 1 reports differs from a.json")
    assert browser.evaluate("document.querySelector('#top').classList.contains('is-bad')")
    cells = "[...document.querySelectorAll('#against tbody tr td')].map(cell => cell.textContent)"
    assert browser.evaluate(cells) == [
        "a.json", "e@cpu", "2.0 ms", "-", "baseline", "b.json", "f@cpu", "3.0 ms", "1.50 x", f"1 node moved {HOSTILE}"
    ]  # fmt: skip
    assert browser.evaluate("document.querySelector('#bad')") is None


CONTROLS = "<b id='bad'>x</b> \x1b[31m"


def tuning() -> TuneResult:
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
        CandidateResult(id="c2", changes={"execution.engine": CONTROLS}, code="inaccurate", reason=CONTROLS, **facts),
    )  # fmt: skip
    return TuneResult(
        model="m.onnx", objective="latency.p50", verdict="winner", reason="c1 won", winner="c1", gain=gain,
        policy={"execution": {"threads": 1}}, min_effect=0.02, confidence=0.99, candidates=rows, front=("c0", "c1"),
        notes=("the load was 7",),
    )  # fmt: skip


def test_candidates_are_shown_with_their_reasons_and_the_front(look):
    browser = look(tuning())
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


FILE = "<b id='bad'>x</b>.json"


class Page:
    """The page of a benchmark, as reports save theirs."""

    def __init__(self, text: str) -> None:
        self.text = text

    def save_html(self, path: Path) -> Path:
        path.write_text(self.text, encoding="utf-8")
        return path


def timings(**samples: list[float]) -> dict[str, Any]:
    facts = dict.fromkeys(("engine", "engine_version", "device", "precision", "cuda_graph"), FILE)
    latency = {call: {"median_us": values[0]} for call, values in samples.items()}
    return {"model": "m.onnx", "samples_us": samples, "latency": latency, "warnings": ["noisy"], **facts}


def near(value: float, runs: int = 50) -> list[float]:
    return [value * (1 + 0.001 * (run % 10 - 4.5)) for run in range(runs)]


def benchmark() -> Page:
    return Page(render_timings(timings(run=near(20.0), bind=near(10.0)), [("b.json", timings(run=near(10.0)))]))


def test_each_run_is_a_point_and_medians_stand_against_the_baseline(look: Callable[..., Any]) -> None:
    now, earlier = timings(run=near(20.0), bind=near(10.0, 5)), timings(run=near(10.0), bind=near(10.0))
    browser = look(Page(render_timings(now, [(FILE, earlier), ("c.json", timings(run=near(11.0), bind=near(9.0)))])))
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
    browser = look(Page(render_timings(timings(run=near(20.0, 5000)), [])))
    assert browser.evaluate("document.querySelectorAll('#runs circle').length") == 1000
    assert "1,000 of 5,000" in browser.evaluate("document.querySelector('#runs .hint').innerText")
    assert browser.evaluate("document.querySelector('#ratios').hidden")


def test_times_that_are_close_have_a_scale(look: Callable[..., Any]) -> None:
    browser = look(Page(render_timings(timings(run=near(19.0), bind=near(16.2)), [])))
    ticks = browser.evaluate("[...document.querySelectorAll('#runs line.tick + text')].map(t => t.textContent)")
    assert len(ticks) > 2, ticks
    assert len(set(ticks)) == len(ticks)


MODEL = "<b id='bad'>x</b>.onnx"


def served() -> Page:
    settings = ServeSettings.coerce(
        {
            "schema": "xpuruntime.serve/1",
            "memory": {"budget": {"cpu": "4GiB"}},
            "models": {
                "digits": {"source": str(demo_model_path()), "batching": {"max_batch_size": 8}},
                "hostile": {"source": f"/nowhere/{MODEL}"},
            },
        }
    )
    with Models(settings) as service:
        image = np.zeros((2, 1, 8, 8), np.float32)
        for _ in range(3):
            service.infer(InferRequest("digits", [InferTensor("image", "FP32", image.shape, image)])).result(60)
        return Page(status_page(service))


def test_models_batches_memory_and_evidence_are_shown(look):
    browser = look(served())
    browser.click("#refresh")
    assert browser.evaluate("document.querySelector('#refresh').textContent") == "Paused"
    assert browser.evaluate("document.querySelector('h1').innerText").endswith("Not ready")
    assert "nowhere" in browser.evaluate("document.querySelector('.says').innerText")
    cells = "[...document.querySelectorAll('#{} tbody tr')].map(r => [...r.cells].map(c => c.textContent))"
    models = {row[0]: row for row in browser.evaluate(cells.format("models"))}
    assert models["digits"][2:4] == ["✓READY", "onnxruntime@cpu (model)"]
    assert models["digits"][4].endswith(" ms")
    assert models["digits"][6] == "3"
    assert MODEL in models["hostile"][3]
    assert browser.evaluate("document.querySelector('#bad')") is None
    assert browser.evaluate(cells.format("batches"))[0][2:5] == ["3", "2.0", "idle 3"]
    assert browser.evaluate(cells.format("memory"))[0][::2] == ["cpu", "4.0 GiB"]
    assert browser.evaluate(cells.format("evidence"))[0][3] == "none"
    browser.click("#refresh")
    assert "every 5 s" in browser.evaluate("document.querySelector('#refresh').textContent")
    browser.click("#refresh")


def verification() -> VerificationResult:
    rows = [("evidence.execution.engine", "pass"), ("accuracy.logits", "fail"), ("speed.latency.p50", "inconclusive")]
    claims = [
        Claim(
            id=id, section=id.partition(".")[0], requested=CONTROLS, observed="seen", verdict=verdict,
            code=ClaimCode.SUBSTITUTED, reason=CONTROLS, fix="do this", figures={"ratio": 1.25}, key="a",
            line=7, column=3,
        )
        for id, verdict in rows
    ]  # fmt: skip
    return VerificationResult(model="m.onnx", policy="p.yaml", claims=tuple(claims), facts={"load": "1"}, notes=("n",))


def test_claims_are_shown_the_worst_first_and_open_on_a_click(look):
    browser = look(verification())
    cells = "[...document.querySelectorAll('#claims tbody tr')].map(r => r.cells[1].textContent)"
    assert browser.evaluate(cells) == ["accuracy.logits", "speed.latency.p50", "evidence.execution.engine"]
    assert browser.evaluate("document.querySelector('h1').innerText").endswith("1 failed, 1 inconclusive, 1 passed")
    first = browser.evaluate("[...document.querySelectorAll('#top .off li')].map(e => e.innerText)")
    assert [text.partition(":")[0] for text in first] == ["accuracy.logits", "speed.latency.p50"]
    assert all("(p.yaml:7:3)" in text and text.endswith("Fix: do this") for text in first)
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
        msgspec.structs.replace(verification().claims[0], id=id, observed=id, figures=figures)
        for id, figures in facts.items()
    ]
    browser = look(VerificationResult(model="m.onnx", policy="p.yaml", claims=tuple(claims)))
    edges = "[...document.querySelectorAll('#limits .track .{}')].map(part => part.getBoundingClientRect().x)"
    points, limits, base = (browser.evaluate(edges.format(part)) for part in ("dot", "limit", "base"))
    order = browser.evaluate("[...document.querySelectorAll('#limits .intervals .name')].map(e => e.textContent)")
    for at, id in enumerate(order):
        assert (points[at] + 5 > limits[at]) == (id == "memory.locked_peak")
        assert (points[at] + 5 > base[at]) == (id != "start")


def test_limits_fit_a_phone(look):
    """A claim's name and a long figure stand in rows of their own."""
    facts = {"ratio": 1.02, "low": 0.99, "high": 1.05, "margin": 0.1, "rounds": 20.0}
    claim = msgspec.structs.replace(verification().claims[2], id="memory.growth", observed="116.1 MiB " * 8)
    browser = look(VerificationResult(model="m", policy="", claims=(msgspec.structs.replace(claim, figures=facts),)))
    browser.resize(390, 900)
    try:
        place = "document.querySelector('#limits li {}').getBoundingClientRect().{}"
        assert browser.evaluate(place.format(".name", "height")) < 30
        rows = [browser.evaluate(place.format(part, "top")) for part in (".name", "> :nth-child(3)", ".track")]
        assert rows == sorted(rows)
        assert browser.evaluate("document.documentElement.scrollWidth") <= 390
    finally:
        browser.resize(1280, 900)


def test_cards_without_content_go(look):
    claims = (msgspec.structs.replace(verification().claims[0], figures={}),)
    browser = look(VerificationResult(model="m.onnx", policy="", claims=claims, notes=("one note",)))
    hidden = "[...document.querySelectorAll('main > section[hidden]')].map(section => section.id)"
    assert browser.evaluate(hidden) == ["limits", "reasons"]
    notes = browser.evaluate("document.querySelector('#notes').innerText")
    assert "one note" in notes
    assert "Reasons: All claims passed." in notes
    assert "There are none" not in notes
