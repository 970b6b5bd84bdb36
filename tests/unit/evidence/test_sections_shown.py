# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Memory over time, CUDA graphs and shapes as they are shown: terminal, page, notebook, and two reports compared."""

from __future__ import annotations

import json

import msgspec
import pytest
from evidence_records import unit
from page_models import HOSTILE
from test_page import Page

from xpuruntime.demo import demo_model_path
from xpuruntime.evidence import Report, compare_reports
from xpuruntime.evidence.cuda_graphs import GraphBlocker, GraphStatus
from xpuruntime.evidence.memory_over_time import LiveBytes, MemorySample
from xpuruntime.evidence.render_text.terminal import plain_text
from xpuruntime.evidence.shape_coverage import InputCoverage, ShapeCoverage
from xpuruntime.inference import InferenceSession

MIB = 1 << 20
FIELDS = ("memory_over_time", "live", "cuda_graph", "shapes")


def samples(*pools, owner="pool a: in use"):
    names = ("before", "instrumented copy loaded", "after the pass")
    rss = "process: resident"
    return tuple(
        MemorySample(moment=name, at_us=1500.0 * i, owners={rss: 100 * MIB} | ({owner: held} if held else {}))
        for i, (name, held) in enumerate(zip(names, pools, strict=True))
    )


def report(**more):
    blocker = GraphBlocker(node="b", op="NonZero", kind="data_dependent", reason="its size is known when it has run")
    fields = {
        "plan": {"engine": "onnxruntime", "device": "cuda:0", "model": {"path": "m.onnx", "sha256": "0" * 64}},
        "units": (unit("a", device="cuda:0"), unit("b", "NonZero", "cuda:0"), unit("c", device="cuda:0")),
        "memory_over_time": samples(None, 3 * MIB, 2 * MIB),
        "live": (
            LiveBytes(unit="a", during=1024, after=1024),
            LiveBytes(unit="b", during=4096, after=2048),
            LiveBytes(unit="c", during=3072, after=512),
        ),
        "cuda_graph": GraphStatus(
            status="blocked", asked="prefer", reason="b (NonZero) cannot be part of a graph",
            blockers=(blocker,), holds_for=("the sizes of x",),
        ),
        "shapes": ShapeCoverage(
            inputs=(
                InputCoverage(
                    input="x", model="n x 4", allowed="1..8 x 4", observed="2 x 4", covered="some",
                    reason="n was 2, one of 8 sizes",
                ),
                InputCoverage(
                    input="k", model="4", allowed="4", observed="4", covered="all", reason="the model fixes every size"
                ),
            ),
            by_shape=("kernels were chosen for 2 x 4",),
        ),
    }  # fmt: skip
    return Report(**{**fields, **more})


def texts(browser, selector):
    return browser.evaluate(f"[...document.querySelectorAll({selector!r})].map(e => e.textContent)")


def words(text):
    return " ".join(text.split())


def test_the_round_trip_is_exact(tmp_path):
    made = report()
    assert Report.load(made.save(tmp_path / "r.json")) == made


def test_a_report_from_before_loads_and_says_nothing_of_them(tmp_path, show):
    old = json.loads(report().to_json())
    for name in FIELDS:
        del old[name]
    path = tmp_path / "old.json"
    path.write_text(json.dumps(old))
    loaded = Report.load(path)
    assert [getattr(loaded, name) for name in FIELDS] == [(), (), None, None]
    shown = str(loaded)
    assert not any(word in shown for word in ("cuda graph", "memory over time", "tensors between", "shapes"))
    browser = show(loaded)
    assert browser.complaints == []
    assert texts(browser, "#cuda-graph .none") == ["The report does not say."]
    assert texts(browser, "#shapes .none") == ["The report does not say."]
    assert texts(browser, "#memory svg") == []


def test_the_terminal():
    shown = words(plain_text(report(), 120))
    assert "cuda graph: blocked (asked: prefer). b (NonZero) cannot be part of a graph" in shown
    assert "b NonZero data dependent its size is known" in shown
    assert "a graph holds for the sizes of x" in shown
    assert "memory over time, at 3 checkpoints" in shown
    assert "pool a: in use - 3.0 MiB instrumented copy loaded 2.0 MiB" in shown
    assert "tensors between units: at most 4.0 KiB, around b (unit 2 of 3)" in shown
    assert "x 1..8 x 4 2 x 4 in part n was 2, one of 8" in shown
    assert "k 4 4 yes the model fixes" in shown
    assert "kernels were chosen for 2 x 4" in shown
    for line in str(report()).splitlines():
        assert len(line) <= 80


def test_the_notebook():
    page = Page(report()._repr_html_())
    shown = words(page.text)
    for text in ("b (NonZero) cannot be part of a graph", "pool a: in use", "3.0 MiB", "at most 4.0 KiB", "1..8 x 4"):
        assert text in shown


def test_the_page_shows_memory_over_time(show):
    browser = show(report())
    assert browser.complaints == []
    rows = texts(browser, "#memory > .body > .scroll tbody tr")
    assert rows == [
        "process: resident" + "before: 100.0 MiBinstrumented copy loaded: 100.0 MiBafter the pass: 100.0 MiB"
        "100.0 MiB100.0 MiBbefore100.0 MiB",
        "pool a: in use" + "instrumented copy loaded: 3.0 MiBafter the pass: 2.0 MiB"
        "-3.0 MiBinstrumented copy loaded2.0 MiB",
    ]
    second = "document.querySelectorAll('#memory .strip')[1].querySelectorAll('rect')"
    high, low = browser.evaluate(f"[...{second}].map(r => +r.getAttribute('height'))")
    assert low / high == pytest.approx(2 / 3, rel=0.01)
    browser.click("#memory details summary")
    assert texts(browser, "#memory details[open] tbody tr") == [
        "before0.0100.0 MiB-",
        "instrumented copy loaded1.5100.0 MiB3.0 MiB",
        "after the pass3.0100.0 MiB2.0 MiB",
    ]


def test_the_page_shows_what_is_live_and_leads_to_the_unit(show):
    browser = show(report())
    heights = browser.evaluate(
        "[...document.querySelectorAll('#memory .live rect')].map(r => +r.getAttribute('height'))"
    )
    assert [round(height / heights[1], 3) for height in heights] == [0.25, 1.0, 0.75]
    assert "At most 4.0 KiB, around b, unit 2 of 3." in texts(browser, "#memory .hint")[1]
    browser.click("#memory .live [data-live='2']")
    assert texts(browser, "#inspector h2") == ["c"]
    assert browser.evaluate("document.querySelector('#memory .live rect.on').dataset.live") == "2"
    browser.evaluate("document.querySelectorAll('#memory details')[1].open = true")
    assert texts(browser, "#memory details[open] tbody td")[:4] == ["b", "2", "4.0 KiB", "2.0 KiB"]


def test_the_page_shows_what_is_in_the_way_and_leads_to_it(show):
    browser = show(report())
    assert texts(browser, "#cuda-graph .badge") == ["✕blocked"]
    assert texts(browser, "#cuda-graph tbody td") == [
        "b", "NonZero", "data dependent", "its size is known when it has run",
    ]  # fmt: skip
    assert texts(browser, "#cuda-graph li") == ["A graph holds for the sizes of x"]
    browser.click("#cuda-graph tbody button")
    assert texts(browser, "#inspector h2") == ["b"]


def test_the_page_shows_shapes(show):
    browser = show(report())
    assert texts(browser, "#shapes tbody tr") == [
        "xn x 41..8 x 42 x 4in partn was 2, one of 8 sizes",
        "k444yesthe model fixes every size",
    ]
    assert texts(browser, "#shapes li") == ["Kernels were chosen for 2 x 4"]


@pytest.mark.parametrize("status", ["captured", "refused", "possible", "unknown", "not_applicable"])
def test_every_status_has_a_word(look, status):
    browser = look(report(cuda_graph=GraphStatus(status=status, asked="off", reason="because of this")))
    shown = browser.evaluate("document.querySelector('#cuda-graph .body').innerText")
    assert "because of this" in shown.lower()
    assert (status in shown) == (status != "not_applicable")


def test_names_that_are_markup_stay_text(look):
    blocker = GraphBlocker(node=HOSTILE, op=HOSTILE, kind="copy", reason=HOSTILE)
    row = InputCoverage(input=HOSTILE, model=HOSTILE, allowed=HOSTILE, observed=HOSTILE, covered="none", reason=HOSTILE)
    made = report(
        units=(unit(HOSTILE),),
        memory_over_time=samples(MIB, MIB, MIB, owner=HOSTILE),
        live=(LiveBytes(unit=HOSTILE, during=1, after=1), LiveBytes(unit="gone", during=2, after=0)),
        cuda_graph=GraphStatus(
            status="blocked", asked="off", reason=HOSTILE, blockers=(blocker,), holds_for=(HOSTILE,)
        ),
        shapes=ShapeCoverage(inputs=(row,), by_shape=(HOSTILE,)),
    )
    browser = look(made)
    assert browser.evaluate("window.hit") is None
    assert texts(browser, "#cuda-graph tbody td")[:2] == [HOSTILE, HOSTILE]
    assert "around a unit that is not in the report" in texts(browser, "#memory .hint")[1]
    assert "<img" not in made._repr_html_()


def changed():
    blocker = GraphBlocker(node="det", op="Det", kind="placement", reason="runs on cpu")
    row = InputCoverage(input="x", model="n x 4", allowed="any x 4", observed="3 x 4", covered="some", reason="other")
    return report(
        memory_over_time=samples(None, 9 * MIB, 2 * MIB),
        live=(LiveBytes(unit="a", during=8192, after=0),),
        cuda_graph=GraphStatus(status="refused", asked="prefer", reason="det is on the cpu", blockers=(blocker,)),
        shapes=ShapeCoverage(inputs=(row,)),
    )


def test_two_reports():
    comparison = compare_reports(report(), changed())
    assert [(peak.owner, peak.before, peak.after) for peak in comparison.peaks] == [
        ("pool a: in use", 3 * MIB, 9 * MIB),
        ("tensors between units", 4096, 8192),
    ]
    assert [(one.about, one.before, one.after) for one in (*comparison.cuda_graph, *comparison.shapes)] == [
        ("status", "blocked", "refused"),
        ("blocker: b (NonZero)", "blocks", None),
        ("blocker: det (Det)", None, "blocks"),
        ("allowed: x", "1..8 x 4", "any x 4"),
        ("observed: x", "2 x 4", "3 x 4"),
        ("allowed: k", "4", None),
        ("observed: k", "4", None),
    ]
    assert comparison.same
    shown = words(str(comparison))
    for text in (
        "status blocked refused det is on the cpu",
        "blocker: b (NonZero) blocks -",
        "blocker: det (Det) - blocks",
        "peak memory, during the pass",
        "tensors between units 4.0 KiB 8.0 KiB",
        "allowed: x 1..8 x 4 any x 4",
    ):
        assert text in shown


def test_noise_of_memory_is_not_told():
    near = report(memory_over_time=samples(None, 3 * MIB + 9, 2 * MIB))
    comparison = compare_reports(report(), near)
    assert (comparison.peaks, comparison.cuda_graph, comparison.shapes, comparison.notes) == ((), (), (), ())
    assert [peak.owner for peak in compare_reports(report(), near, noise=0).peaks] == ["pool a: in use"]


def test_a_report_from_before_is_not_held_against_the_other():
    old = msgspec.structs.replace(report(), memory_over_time=(), live=(), cuda_graph=None, shapes=None)
    for pair, name in (((old, report()), "before"), ((report(), old), "after")):
        comparison = compare_reports(*pair)
        assert (comparison.peaks, comparison.cuda_graph, comparison.shapes) == ((), (), ())
        assert comparison.notes[0].startswith(f"'{name}' does not have memory over time, CUDA graphs, shapes")


def test_the_page_of_two_reports(look):
    browser = look(compare_reports(report(), changed()))
    assert texts(browser, "#cuda-graph tbody tr") == [
        "statusblockedrefuseddet is on the cpu",
        "blocker: b (NonZero)blocks--",
        "blocker: det (Det)-blocks-",
    ]
    assert texts(browser, "#peaks tbody tr") == ["pool a: in use3.0 MiB9.0 MiB", "tensors between units4.0 KiB8.0 KiB"]
    assert texts(browser, "#shapes tbody tr") == [
        "allowed: x1..8 x 4any x 4",
        "observed: x2 x 43 x 4",
        "allowed: k4-",
        "observed: k4-",
    ]


@pytest.mark.parametrize("engine", ["onnxruntime"])
def test_the_page_of_a_real_session(look, engine):
    if engine != "onnxruntime":
        pytest.importorskip(engine)
    with InferenceSession(demo_model_path(), device="cpu", engine=engine) as session:
        made = session.explain(runs=2)
    browser = look(made)
    assert len(texts(browser, "#memory .live rect")) == len(made.live) > 5
    assert "Does not apply: runs on cpu" in texts(browser, "#cuda-graph .body")[0]
    assert texts(browser, "#shapes tbody td")[0] == "image"
