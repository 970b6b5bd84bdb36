# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The page of what differs between two reports, as text and clicked through in a real browser."""

from __future__ import annotations

import msgspec
import pytest
from page_models import HOSTILE, deep_model
from test_page import Page, data_of, hostile

import xpuruntime as xrt
from xpuruntime.evidence import compare_reports

#: Text of the cells in one column of the table of nodes.
COLUMN = "[...document.querySelectorAll('#nodes tbody tr')].map(r => r.cells[{}].textContent)"
NODES, WHAT, BEFORE, AFTER, DIFFERENCE, SPEED = 1, 2, 3, 4, 7, 8


def moved_on(model: object) -> xrt.ReportComparison:
    """A report of a run beside itself with all units on another device, and the first slower by far."""
    with xrt.InferenceSession(model, device="cpu", engine="onnxruntime") as session:
        before = session.explain(runs=2)
    units = [msgspec.structs.replace(unit, device="cuda:0") for unit in before.units]
    slow = msgspec.structs.replace(units[0].time, value=units[0].time.value + 1e6)
    units[0] = msgspec.structs.replace(units[0], time=slow)
    return compare_reports(before, msgspec.structs.replace(before, units=tuple(units)))


@pytest.fixture(scope="module")
def moved() -> xrt.ReportComparison:
    return moved_on(xrt.demo_model_path())


def column(browser, index):
    return browser.evaluate(COLUMN.format(index))


def text(browser, selector):
    return browser.evaluate(f"document.querySelector({selector!r}).innerText")


def test_all_that_differs_is_in_the_page(moved):
    data = data_of(Page(moved.to_html()))
    assert data["headline"] == moved.headline
    assert [group["nodes"] for group in data["groups"]] == [list(group.nodes) for group in moved.groups]
    assert [group["what"] for group in data["groups"]] == [list(group.what) for group in moved.groups]
    assert len(data["keys"]) == len(moved.keys)
    assert len(data["surroundings"]) == len(moved.surroundings)
    assert moved.headline in Page(moved.to_html()).text  # without scripts, too


def test_another_kernel_of_ours_is_shown(look, tmp_path):
    model = deep_model(tmp_path / "deep.onnx", 16)
    reports = []
    for kernel in ("cpu.blas", "cpu.reference"):
        policy = {"mode": "strict", "kernels": {"matmul": kernel}}
        with xrt.InferenceSession(model, device="cpu", engine="onnxruntime", policy=policy) as session:
            reports.append(session.explain(runs=1))
    comparison = compare_reports(*reports)
    assert comparison.decisions
    browser = look(comparison)
    shown = text(browser, "#decisions .body")
    assert "cpu.blas" in shown
    assert "cpu.reference" in shown
    assert len(data_of(Page(comparison.to_html()))["decisions"]) == len(comparison.decisions)


def test_what_moved_and_what_became_slower(look, moved):
    browser = look(moved)
    assert text(browser, "h1").endswith(moved.headline)
    assert len(column(browser, NODES)) == len(moved.groups)
    assert column(browser, BEFORE)[0].startswith("onnxruntime@cpu")
    assert column(browser, AFTER)[0].startswith("onnxruntime@cuda:0")
    bars = browser.evaluate("[...document.querySelectorAll('#speed .bars .num')].map(e => e.textContent)")
    assert bars[0] == "+1,000,000 us"
    browser.click(f"#nodes thead th:nth-child({DIFFERENCE + 1}) button")
    assert column(browser, SPEED)[0] == "▲slower"
    assert column(browser, NODES)[0].startswith(moved.groups[0].nodes[0])
    assert set(column(browser, WHAT)) == {"placement"}


def test_the_table_filters_and_tells_all_nodes_of_a_group(look, moved):
    browser = look(moved)
    browser.choose("select[data-facet=speed]", "=slower")
    slower = sum(group.time is not None and group.time.verdict == "slower" for group in moved.groups)
    assert len(column(browser, NODES)) == slower > 0
    browser.click("#nodes tbody tr .link")
    assert "onnxruntime@cpu" in text(browser, "#nodes .hint")
    browser.click("#nodes input[type=search]")
    browser.type("no such node")
    assert column(browser, NODES) == []


def test_the_same_report_twice(look, mixed):
    browser = look(compare_reports(mixed, mixed))
    assert text(browser, "h1").endswith("Nothing moved")
    assert browser.evaluate("document.querySelector('#top').className") == "hero is-good"
    assert "No difference in any" in text(browser, "#nodes")
    assert "No key differs" in text(browser, "#policy")


def test_text_of_reports_never_becomes_markup(look):
    before = hostile()
    unit = msgspec.structs.replace(before.units[0], device=f"npu{HOSTILE}", kernel=f"k{HOSTILE}")
    browser = look(compare_reports(before, msgspec.structs.replace(before, units=(unit,))))
    assert browser.evaluate("window.hit === undefined && document.querySelectorAll('img').length === 0")
    assert HOSTILE in browser.evaluate("document.querySelector('#nodes tbody td:nth-child(5)').title")
