# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The page of a comparison as text, and in a real browser: the plot of the drift, its table, its odd figures."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from fault_engine import FaultEngine
from page_models import HOSTILE, deep_model, hostile_model
from test_page import Page, data_of

import xpuruntime as xrt
from xpuruntime.engines.model import inspect_model
from xpuruntime.engines.onnxruntime import OnnxRuntimeEngine

MODEL = xrt.demo_model_path()
LAYERS = [node.name for node in inspect_model(MODEL).nodes if node.op != "Constant"]
#: Text of the cells in one column of the table of layers.
COLUMN = "[...document.querySelectorAll('#layers tbody tr')].map(r => r.cells[{}].textContent)"
PLACE, WITHIN, LAYER, OP, CANDIDATE, ERROR = range(6)


def compared(fault: FaultEngine, model: object = MODEL, **options: object) -> xrt.Comparison:
    """An engine with a fault beside one without, both run."""
    registry = fault.registry()
    registry.register(OnnxRuntimeEngine())
    options = {"layers": True, "search": False, **options}
    return xrt.compare_engines(model, ["fault", "onnxruntime"], device="cpu", registry=registry, runs=1, **options)


@pytest.fixture(scope="module")
def faulty() -> xrt.Comparison:
    return compared(FaultEngine("conv2"), search=True)


def column(browser, index):
    return browser.evaluate(COLUMN.format(index))


def text(browser, selector):
    return browser.evaluate(f"document.querySelector({selector!r}).innerText")


def number(browser, selector):
    return browser.evaluate(f"document.querySelectorAll({selector!r}).length")


def test_the_data_is_what_was_measured(faulty):
    data = data_of(Page(faulty.to_html()))
    assert data["layers"]["name"] == LAYERS
    points = data["points"]
    assert points["row"] == [0] * len(LAYERS) + [1] * len(LAYERS)
    measured = [layer.figures.max_rel for row in faulty.rows for layer in row.drift.layers]
    assert points["max_rel"] == pytest.approx(measured, rel=1e-6)
    assert [i for i, first in enumerate(points["first"]) if first] == [LAYERS.index("conv2")]


def test_verdict_engines_and_outputs(look, faulty):
    browser = look(faulty)
    assert text(browser, "h1").endswith("Of 2 engines, 1 differs")
    assert "the first layer out of tolerance: conv2 (Conv)" in text(browser, "#top .says")
    assert number(browser, "#engines tbody tr") == 2
    assert number(browser, "#outputs tbody tr") == 2
    assert number(browser, "#outputs tr.off") == 1
    assert "light" in browser.evaluate("document.documentElement.style.colorScheme")


def test_the_plot_has_a_point_for_each_layer_and_marks_the_first_that_differs(look, faulty):
    browser = look(faulty)
    for row in (0, 1):
        assert number(browser, f"[data-series='{row}'] .point") == len(LAYERS)
    assert number(browser, ".point.first") == 1
    title = browser.evaluate("document.querySelector('.point.first title').textContent")
    assert title.startswith("conv2 (Conv)\nfault@cpu (model): relative error 0.214")
    assert browser.evaluate("document.querySelector('text.mark').textContent") == "first out of tolerance: conv2 (Conv)"
    assert browser.evaluate("document.querySelector('text.limit').textContent") == "tolerance 0.0001"
    beyond = sum(not layer.figures.passed for layer in faulty.rows[0].drift.layers)
    assert number(browser, ".point.beyond") == beyond > 5


def test_higher_errors_are_drawn_higher_and_layers_go_from_left_to_right(look, faulty):
    browser = look(faulty)
    places = browser.evaluate(
        "[...document.querySelectorAll('[data-series=\"0\"] .point')]"
        ".map(p => [+p.getAttribute('cx'), +p.getAttribute('cy')])"
    )
    assert [x for x, _ in places] == sorted(x for x, _ in places)
    pairs = list(zip(places, (layer.figures.max_rel for layer in faulty.rows[0].drift.layers), strict=True))
    limit = browser.evaluate("+document.querySelector('line.limit').getAttribute('y1')")
    for (_, y), error in pairs:
        assert (y < limit) is (error > faulty.rows[0].tolerance.rtol)
    scale = [(y, math.log10(error)) for (_, y), error in pairs if error]
    slopes = np.polyfit([log for _, log in scale], [y for y, _ in scale], 1)
    assert slopes[0] < 0
    assert all(abs(np.polyval(slopes, log) - y) < 0.2 for y, log in scale)


def test_the_table_sorts_filters_and_is_joined_to_the_plot(look, faulty):
    browser = look(faulty)
    assert len(column(browser, LAYER)) == 2 * len(LAYERS)
    browser.click(f"#layers thead th:nth-child({ERROR + 1}) button")
    worst = max(faulty.rows[0].drift.layers, key=lambda layer: layer.figures.max_rel)
    assert column(browser, LAYER)[0] == worst.name
    browser.choose("select[data-facet=candidate]", "=onnxruntime@cpu (model)")
    assert column(browser, LAYER) == LAYERS
    assert set(column(browser, ERROR)) == {"0"}
    browser.choose("select[data-facet=tolerance]", "=out")
    assert column(browser, LAYER) == []
    browser.click(".point.first")  # clears filters that hide it
    assert browser.evaluate("document.querySelector('#layers tr.on').cells[2].textContent") == "conv2"
    assert "conv2 (Conv); fault@cpu" in text(browser, "#drift [role=status]")
    browser.click("#layers input[type=search]")
    browser.type("conv1")
    assert set(column(browser, LAYER)) == {"conv1"}
    browser.click("#layers tbody tr .link")
    assert "conv1" in browser.evaluate("document.querySelector('.point.on title').textContent")


def test_the_heat_map_has_a_row_for_each_candidate_and_marks_what_is_out(look, faulty):
    browser = look(faulty)
    points = data_of(Page(faulty.to_html()))["points"]
    assert number(browser, "#drift .heat rect") == len(points["row"])
    assert number(browser, "#drift .heat rect.beyond") == points["passed"].count(0) > 0
    browser.click("#drift .heat rect.beyond")
    assert text(browser, "#layers tr.on td:nth-child(2)").endswith("out")


def test_a_candidate_can_be_hidden(look, faulty):
    browser = look(faulty)
    browser.click("#drift .legend button")
    shown = "getComputedStyle(document.querySelector('[data-series=\"{}\"]')).display"
    assert [browser.evaluate(shown.format(i)) for i in (0, 1)] == ["none", "inline"]


@pytest.mark.parametrize("by", [np.nan, np.inf])
def test_what_is_no_number_stands_above_the_scale(look, by):
    browser = look(compared(FaultEngine("conv2", by=by)))
    heights = browser.evaluate(
        "[document.querySelector('.point.first').getAttribute('cy'),"
        "document.querySelector('line.limit').getAttribute('y1')].map(Number)"
    )
    assert heights[0] == 44 < heights[1]
    assert "NaN or infinite" in browser.evaluate("document.querySelector('.point.first title').textContent")
    browser.click(f"#layers thead th:nth-child({ERROR + 1}) button")
    assert "NaN or infinite" in column(browser, ERROR)[0]


def test_figures_without_a_number_and_zeros(look, faulty):
    """Errors that runs rarely give: infinite, NaN, zero, tiny."""
    layers = list(faulty.rows[0].drift.layers)
    for i, value in enumerate((math.inf, math.nan, 0.0, 1e-320, 1e300)):
        figures = msgspec.structs.replace(layers[i].figures, max_rel=value, max_abs=value, passed=True)
        layers[i] = msgspec.structs.replace(layers[i], figures=figures)
    drift = msgspec.structs.replace(faulty.rows[0].drift, layers=tuple(layers))
    row = msgspec.structs.replace(faulty.rows[0], drift=drift, max_rel=math.inf)
    browser = look(msgspec.structs.replace(faulty, rows=(row,)))
    ys = browser.evaluate("[...document.querySelectorAll('.point')].map(p => +p.getAttribute('cy'))")
    assert ys[:3] == [44, 44, 296]
    assert 66 <= ys[4] < ys[3] <= 272
    assert all(44 <= y <= 296 for y in ys)
    assert column(browser, ERROR)[:2] == ["∞", "NaN"]
    assert browser.evaluate("document.querySelector('#engines tbody').innerText").count("∞") == 1


@pytest.mark.parametrize(
    ("options", "engines", "words"),
    [
        ({}, ["onnxruntime"], ["it was not asked for", "xrt compare MODEL --layers --html FILE"]),
        ({"layers": True}, ["ort@npu"], ["Not run, for the reasons above", "npu"]),
    ],
)
def test_without_drift_the_page_says_why_and_how_to_get_it(look, options, engines, words):
    browser = look(xrt.compare_engines(MODEL, engines, device="cpu", runs=1, **options))
    said = text(browser, "#drift .body")
    assert [word for word in words if word not in said] == []
    assert number(browser, "#drift svg") == 0
    assert "Layers: No layer was measured" in text(browser, "#notes")


def test_layers_that_an_engine_does_not_give_are_told_with_the_reason(look):
    browser = look(compared(FaultEngine("conv2", hidden=lambda name: True)))
    said = text(browser, "#drift")
    assert "fault@cpu (model): 1 layer measured" in said
    assert f"{len(LAYERS) - 1} layers could not be, see the notes. To get them: make the tensors in question" in said
    assert number(browser, "[data-series='0'] .point") == 1
    assert number(browser, "[data-series='1'] .point") == len(LAYERS)
    notes = browser.evaluate("document.querySelector('#notes').textContent")
    assert f"Not measured on fault@cpu (model) ({len(LAYERS) - 1})" in notes
    assert "the model was refused with it as an output: one output is all it gives" in notes


def test_names_of_a_model_never_become_markup(look, tmp_path):
    model = hostile_model(tmp_path / "hostile.onnx")
    browser = look(compared(FaultEngine(f"two/{HOSTILE}"), model))
    assert browser.evaluate("window.hit === undefined")
    assert column(browser, LAYER)[0].startswith("…")
    assert HOSTILE in browser.evaluate("document.querySelector('.point.first title').textContent")
    assert number(browser, "img") == 0


def test_two_thousand_layers(look, tmp_path):
    model = deep_model(tmp_path / "deep.onnx", 2000)
    names = [node.name for node in inspect_model(model).nodes]
    table = compared(FaultEngine(names[1234]), model)
    assert len(table.to_html().encode()) < 2_000_000
    browser = look(table)
    assert number(browser, ".point") == 4000
    assert number(browser, ".heat rect") == 2 * 160  # neighbors share a column, and the worst of them is shown
    assert number(browser, ".heat rect.beyond") > 0
    assert browser.evaluate("document.querySelector('.point.first title').textContent").startswith(names[1234])
    assert "its outputs agree, and a layer inside of it does not: " + names[1234] in text(browser, "#top .says")
    browser.click(".point.first")
    assert browser.evaluate("document.querySelector('#layers tr.on .link').closest('td').title") == names[1234]
