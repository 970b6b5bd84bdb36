# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Pages at the widths of a desktop and of a phone: nothing overflows, words are whole, all can use them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import test_result_pages
from chromium import axe_script
from sampled import part

import xpuruntime as xrt
from xpuruntime.evidence import Observation, Report, compare_reports

if TYPE_CHECKING:
    from collections.abc import Callable

    from chromium import Browser

EXAMPLES = sorted((Path(__file__).resolve().parents[4] / "docs" / "examples").glob("*.html"))
#: Words of letters and digits that stand on more than one line, where they are no longer than 28; shown text alone.
BROKEN = """
(() => {
  const found = [], walk = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode;
    if (!node.parentElement.offsetParent || node.parentElement.closest("pre, svg, script, select")) continue;
    for (const word of node.data.matchAll(/[A-Za-z0-9]{2,28}(?![A-Za-z0-9])/g)) {
      if (/[A-Za-z0-9]/.test(node.data[word.index - 1] || "")) continue;
      const range = document.createRange();
      range.setStart(node, word.index);
      range.setEnd(node, word.index + word[0].length);
      const lines = new Set([...range.getClientRects()].filter((r) => r.width).map((r) => Math.round(r.top)));
      if (lines.size > 1) found.push(word[0]);
    }
  }
  return JSON.stringify(found);
})()
"""
#: Labels of tables that are wider than their place.
CUT_OFF = """
JSON.stringify([...document.querySelectorAll(".scroll")]
  .filter((e) => e.offsetParent && e.scrollWidth > e.clientWidth + 1)
  .map((e) => e.firstElementChild.getAttribute("aria-label")))
"""


def examine(browser: Browser, width: int) -> None:
    browser.resize(width, 900)
    try:
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert json.loads(browser.evaluate(BROKEN)) == []
        if width >= 1440:
            assert json.loads(browser.evaluate(CUT_OFF)) == []
    finally:
        browser.resize(1280, 900)


@pytest.fixture(scope="module")
def shown() -> dict[str, Any]:
    """Return a report, a comparison of engines with one that differs and one that is rejected, and one of reports."""
    model = xrt.demo_model_path()
    with xrt.InferenceSession(model, engine="onnxruntime", device="cpu") as session:
        report = session.explain(runs=1)
    with xrt.InferenceSession(model, engine="null", device="cpu") as session:
        other, other_plan = session.explain(runs=1), session.plan
    engines = ["onnxruntime", "null", "tensorrt", "qnn"]
    compared = xrt.compare_engines(model, engines, device="cpu", runs=1, layers=True, search=False)
    return {"report": report, "comparison": compared, "changes": compare_reports(report, other), "plan": other_plan}


@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("page", ["report", "comparison", "changes", "plan"])
def test_words_are_whole_and_tables_fit(look: Callable[..., Browser], shown: Any, page: str, width: int) -> None:
    examine(look(shown[page]), width)


@pytest.fixture(scope="module")
def axe() -> str:
    script = axe_script()
    if script is None:
        pytest.skip("needs axe-core: pip install --no-deps --group accessibility-no-deps")
    return script


PAGES = ["report", "mixed", "comparison", "changes", "tuning", "verification", "index", "timings", "serving", "shown"]
WIDTHS = [(1440, "light"), (390, "dark")]


@pytest.mark.parametrize(("page", "width", "scheme"), part([(page, *width) for page in PAGES for width in WIDTHS], 3))
def test_axe_finds_nothing(
    look: Callable[..., Browser], shown: Any, mixed: Report, axe: str, page: str, width: int, scheme: str
) -> None:
    others = {
        "mixed": lambda: mixed, "tuning": test_result_pages.tuning,
        "verification": test_result_pages.verification, "index": test_result_pages.index,
        "timings": test_result_pages.benchmark, "serving": test_result_pages.served,
        "shown": lambda: xrt.plan(xrt.demo_model_path(), {"kernels": {"matmul": "cpu.blas"}}, device="cpu"),
    }  # fmt: skip
    browser = look(others[page]() if page in others else shown[page])
    browser.resize(width, 900)
    browser.prefer(scheme)
    try:
        browser.evaluate("document.querySelector('#refresh')?.click();")
        browser.evaluate("for (const shut of document.querySelectorAll('details')) shut.open = true;")
        browser.evaluate("document.querySelector('tbody .link')?.click();")
        assert browser.accessibility_findings(axe) == []
    finally:
        browser.resize(1280, 900)
        browser.prefer("light")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_are_made_of_the_page_as_it_is(browser: Browser, example: Path) -> None:
    browser.open(example)
    assert browser.evaluate("document.documentElement.dataset.ready") == "true"
    browser.resize(390, 900)
    try:
        assert browser.evaluate("document.documentElement.scrollWidth") <= 390
        assert json.loads(browser.evaluate(BROKEN)) == []
    finally:
        browser.resize(1280, 900)
    style = (Path(xrt.__file__).parent / "evidence" / "page" / "page.css").read_text(encoding="utf-8")
    assert style in example.read_text(encoding="utf-8")


def deviating(report: Report, count: int) -> Report:
    observations = tuple(
        Observation(
            key=f"kernels.rules[{index}]",
            requested="flash_v2",
            resolved="-",
            observed="MatMul, Softmax",
            status="unsupported",
            reason=f"rule {index} has no kernel here",
        )
        for index in range(count)
    )
    controls = [{"key": "kernels.rules[0]", "fix": "use an engine with this kernel"}]
    return msgspec.structs.replace(report, observations=observations, plan={**report.plan, "controls": controls})


@pytest.mark.parametrize("count", [1, 3, 9])
def test_the_headline_names_deviations_and_what_to_do(look: Callable[..., Browser], shown: Any, count: int) -> None:
    browser = look(deviating(shown["report"], count))
    lines = json.loads(
        browser.evaluate("JSON.stringify([...document.querySelectorAll('#top .off li')].map((e) => e.innerText))")
    )
    assert lines[4:] == (["and 5 more"] if count == 9 else [])
    assert len(lines[:4]) == min(count, 4)
    assert "kernels.rules[0]: flash_v2 was asked for, and MatMul, Softmax was observed: rule 0 has" in lines[0]
    assert "Fix: use an engine with this kernel" in lines[0]
    assert all("Fix: " in line for line in lines[:4])


def test_a_report_without_deviations_lists_none(look: Callable[..., Browser], shown: Any) -> None:
    assert look(shown["report"]).evaluate("document.querySelectorAll('#top .off').length") == 0
