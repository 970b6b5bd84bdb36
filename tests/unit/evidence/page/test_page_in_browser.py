# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The page of a report in a real browser: clicked through, by mouse and by keyboard."""

from __future__ import annotations

import zlib

import msgspec
import pytest
from evidence_records import LATENCY
from page_models import HOSTILE, long_named_model
from test_page import hostile

from xpuruntime.evidence import Report, compare_reports
from xpuruntime.evidence.records import Span, Timeline
from xpuruntime.inference import InferenceSession

#: Text of the cells in one column of the table of units.
COLUMN = "[...document.querySelectorAll('#units tbody tr')].map(r => r.cells[{}].textContent)"
STATUS, UNIT, OP, TIME = 1, 2, 3, 9


def column(browser, index):
    return browser.evaluate(COLUMN.format(index))


def texts(browser, selector):
    return browser.evaluate(f"[...document.querySelectorAll({selector!r})].map(e => e.textContent)")


def head(name):
    """The selector of a column's button, by its place."""
    return f"#units thead th:nth-child({name + 1}) button"


def test_it_opens_from_a_file_asks_for_nothing_and_complains_of_nothing(show, mixed):
    browser = show(mixed)
    assert [url.partition(":")[0] for url in browser.requests] == ["file"]
    assert browser.complaints == []
    assert browser.evaluate("document.querySelector('h1').innerText").endswith(mixed.headline)
    assert "Partial" in browser.evaluate("document.querySelector('#top').innerText")


def test_the_network_is_closed_even_to_scripts(show, mixed):
    browser = show(mixed)
    refused = "fetch('data:text/plain,x').then(() => 'loaded', () => 'refused')"
    assert browser.evaluate(refused) == "refused"
    image = (
        "new Promise(done => { const i = new Image(); i.onload = () => done('loaded');"
        "i.onerror = () => done('refused'); i.src = 'data:image/gif;base64,R0lGODlhAQABAAAAACwAAAAAAQABAAA='; })"
    )
    assert browser.evaluate(image) == "refused"
    assert browser.evaluate("try { document.body.innerHTML = '<b>x</b>'; 'set' } catch (e) { e.name }") == "TypeError"


def test_deviations_come_first_and_say_so_in_words(show, mixed):
    browser = show(mixed)
    statuses = texts(browser, "#policy table.policy .badge")
    assert statuses == ["✕substituted", "!unsupported", "?unobservable", "✓honoured"]
    assert sorted(s[1:] for s in statuses) == sorted(o.status for o in mixed.observations)


def test_columns_sort_both_ways(show, mixed):
    browser = show(mixed)
    order = [u.id for u in mixed.units]
    assert column(browser, UNIT) == order
    browser.click(head(UNIT))
    assert column(browser, UNIT) == sorted(order)
    browser.click(head(UNIT))
    assert column(browser, UNIT) == sorted(order, reverse=True)
    assert browser.evaluate(f"document.querySelector({head(UNIT)!r}).closest('th').ariaSort") == "descending"
    for index in range(browser.evaluate("document.querySelectorAll('#units thead th').length")):
        browser.click(head(index))
        assert sorted(column(browser, UNIT)) == sorted(order)


def test_filters_by_text_and_by_facts(show, mixed):
    browser = show(mixed)
    browser.click("#units input")
    browser.type("body")
    assert column(browser, UNIT) == ["body+add"]
    assert "1 of 6 units" in texts(browser, "#units .count")
    browser.click("#units .row > button")
    assert len(column(browser, UNIT)) == 6
    for facet, value, found in (
        ("status", "=substituted", ["stem/relu"]),
        ("device", "=npu", ["island"]),
        ("ran in", "=fp16", ["stem/conv"]),
        ("op", "=Shape", ["shape"]),
        ("relation", "=inserted", ["copy"]),
    ):
        browser.choose(f'[data-facet="{facet}"]', value)
        assert column(browser, UNIT) == found
        browser.click("#units .row > button")


def test_the_theme_follows_the_system_and_can_be_changed(show, mixed):
    browser = show(mixed)
    ground = "getComputedStyle(document.body).backgroundColor"
    light = browser.evaluate(ground)
    browser.prefer("dark")
    dark = browser.evaluate(ground)
    assert light != dark
    browser.prefer("light")
    assert browser.evaluate(ground) == light
    browser.click("#theme")
    assert (browser.evaluate(ground), texts(browser, "#theme")) == (dark, ["Theme: dark"])
    browser.click("#theme")
    assert (browser.evaluate(ground), texts(browser, "#theme")) == (light, ["Theme: light"])
    browser.click("#theme")
    assert texts(browser, "#theme") == ["Theme: system"]


def boxes(browser):
    """Name of each box of the graph to its class and its third line."""
    found = browser.evaluate(
        "[...document.querySelectorAll('#graph .box')].map(b => [b.querySelector('.name').textContent, "
        "b.querySelector('rect').getAttribute('class'), b.querySelector('.word').textContent, "
        "b.getAttribute('aria-label')])"
    )
    return {name: (look, word, label) for name, look, word, label in found}


def test_the_graph_is_coloured_four_ways_with_a_word_each(show, mixed):
    browser = show(mixed)
    by_place = boxes(browser)
    assert {name: word for name, (_, word, _) in by_place.items()} == {
        "conv": "cuda:0", "relu": "cpu", "shape": "folded", "mul": "cuda:0", "add": "cuda:0", "head": "npu",
    }  # fmt: skip
    assert by_place["conv"][0] == by_place["mul"][0] != by_place["relu"][0]
    assert "deviates" in by_place["relu"][2]
    assert any("cuda:0 (3 nodes)" in text for text in texts(browser, "#graph .legend li"))
    browser.click("[data-colour=precision]")
    assert (boxes(browser)["conv"][1], boxes(browser)["relu"][1]) == ("fp16", "fp32")
    browser.click("[data-colour=time]")
    timed = boxes(browser)
    assert timed["conv"][1] == "80.0 us, 66.7 %"  # of the wall time alone: cycles are no part of the sum
    assert timed["head"][1] == "5,000,000 cycles, 100.0 %"
    assert timed["mul"][1] == timed["add"][1] == "20.0 us, 16.7 %"
    browser.click("[data-colour=status]")
    assert boxes(browser)["relu"][:2] == ("v-substituted", "substituted")
    assert browser.evaluate("document.querySelector('[data-colour=status]').ariaPressed") == "true"


def test_a_group_tells_what_is_in_it(show, mixed):
    browser = show(mixed)
    browser.choose("#detail", "1")
    found = boxes(browser)
    assert found["2 nodes"]
    strips = browser.evaluate(
        "[...document.querySelectorAll('#graph .group-box')].map(b => [b.querySelector('.op').textContent, "
        "b.querySelector('.word').textContent, [...b.querySelectorAll('.strip')].map(s => s.getAttribute('width'))])"
    )
    assert [(name, word, len(widths)) for name, word, widths in strips] == [
        ("stem", "1 cuda:0, 1 cpu", 2),
        ("body", "cuda:0", 0),
    ]
    assert strips[0][2][0] == strips[0][2][1]  # one of two nodes each
    browser.click("[data-colour=time]")
    assert browser.evaluate("document.querySelectorAll('#graph .strip').length") == 0
    assert browser.evaluate("document.querySelector('#graph .word').textContent") == "85.0 us, 70.8 %"
    browser.click("#graph .group-box > rect", double=True)
    assert "relu" in boxes(browser)
    browser.click("#graph .box[aria-label^='stem/relu'] > rect")
    browser.click("#inspector .row button:last-child")
    assert "relu" not in boxes(browser)


def test_a_click_on_a_node_shows_its_unit(show, mixed):
    browser = show(mixed)
    browser.click("#graph .box[aria-label^='body/mul'] rect")
    card = browser.evaluate("document.querySelector('#inspector').innerText")
    assert card.splitlines()[0] in ("Close", "body+add")
    assert "FusedAdd" in card
    assert "body/add" in card
    assert browser.evaluate("document.querySelectorAll('#graph .box.same').length") == 1  # the other half of the unit
    assert browser.evaluate("document.querySelector('#units tr.on').cells[2].textContent") == "body+add"
    browser.press("Escape")
    assert browser.evaluate("document.querySelector('#inspector').hidden") is True
    assert browser.evaluate("document.querySelectorAll('.box.on, tr.on').length") == 0


def test_a_row_shows_its_unit_and_leads_to_the_graph(show, mixed):
    browser = show(mixed)
    browser.click("#units tbody tr:nth-child(2)")
    assert "stem/relu" in browser.evaluate("document.querySelector('#inspector').innerText")
    browser.click("#inspector .row button")
    assert browser.evaluate("document.querySelector('.box.on .name').textContent") == "relu"


def test_the_graph_moves_and_zooms(show, mixed):
    browser = show(mixed)
    where = "document.querySelector('.canvas svg > g').getAttribute('transform')"
    browser.evaluate("document.querySelector('.canvas').scrollIntoView({behavior: 'instant', block: 'center'})")
    before = browser.evaluate(where)
    browser.drag(".canvas", 60, 30)
    moved = browser.evaluate(where)
    assert moved != before
    browser.click(".zoom button:nth-child(2)")
    assert browser.evaluate(where) != moved
    browser.click(".zoom button:nth-child(3)")
    assert browser.evaluate(where) == before


def test_the_keyboard_goes_everywhere(show, mixed):
    browser = show(mixed)
    browser.evaluate("document.querySelector('.canvas svg').focus()")
    for key in ("ArrowDown", "ArrowDown", "Enter"):
        browser.press(key)
    assert "stem/relu" in browser.evaluate("document.querySelector('#inspector').innerText")
    browser.press("Escape")
    browser.evaluate("document.querySelector('.lanes svg').focus()")
    for name in ("stem/relu", "copy", "body+add"):  # it goes on from where the reader was
        browser.press("ArrowRight")
        assert browser.evaluate("document.querySelector('#inspector h2').textContent") == name
    browser.press("Escape")
    browser.evaluate("document.querySelector('#units tbody tr:nth-child(4) button').focus()")
    browser.press("Enter")
    assert browser.evaluate("document.activeElement.textContent") == "Close"  # the card has the focus
    browser.press("Escape")
    assert browser.evaluate("document.activeElement.textContent") == "body+add"  # and gives it back
    reach = (
        "[...document.querySelectorAll('button, select, input, summary, a[href]')].filter(e => e.tabIndex < 0).length"
    )
    assert browser.evaluate(reach) == 0
    unnamed = (
        "[...document.querySelectorAll('button, select, input, section, svg[tabindex], [role=option]')].filter(e => "
        "!(e.ariaLabel || e.textContent.trim() || e.closest('label') || e.getAttribute('aria-labelledby'))).length"
    )
    assert browser.evaluate(unnamed) == 0


def test_times_of_different_kinds_are_apart(show, mixed):
    browser = show(mixed)
    assert texts(browser, "#time .body > h3") == [
        "120.0 us, wall time in 4 units, of 5 instrumented runs",
        "5,000,000 cycles in 1 unit, of 3 instrumented runs",
    ]
    assert browser.evaluate("document.querySelectorAll('#timeline svg').length") == 2
    assert "end to end" in browser.evaluate("document.querySelector('#timeline .lead').textContent")


def test_the_timeline_of_a_run_has_lanes_and_adds_up(show, mixed):
    spans = (
        Span(name="stem/conv", unit="stem/conv", kind="unit", lane="thread 1", start_us=2.0, us=6.0),
        Span(name="gemm", unit="stem/conv", kind="kernel", lane="cuda:0 stream 7", start_us=5.0, us=7.0),
        Span(name="stem/relu", unit="stem/relu", kind="unit", lane="thread 1", start_us=14.0, us=2.0),
        *(Span(name="step", kind="unit", lane="thread 2", start_us=14.0 + i / 1e4, us=1e-4) for i in range(1000)),
    )
    browser = show(msgspec.structs.replace(mixed, timeline=Timeline(run_us=20.0, spans=spans)))
    assert texts(browser, "#timeline svg > text > title") == ["thread 1", "cuda:0 stream 7", "thread 2"]
    rows = browser.evaluate(
        "[...document.querySelectorAll('#timeline tbody tr')].map(r => [...r.cells].map(c => c.innerText))"
    )
    assert rows == [
        ["before the first", "2.0", "10.0 %"],
        ["in units, on the host", "8.0", "40.0 %"],
        ["on a device alone", "4.0", "20.0 %"],
        ["between", "2.0", "10.0 %"],
        ["after the last", "4.0", "20.0 %"],
        ["the run", "20.0", "100.0 %"],
    ]
    assert (
        browser.evaluate("document.querySelectorAll('#timeline rect.unit').length") < 100
    )  # narrow ones are drawn as one
    browser.click("#timeline rect.unit[aria-label^='gemm']")
    assert "stem/conv" in browser.evaluate("document.querySelector('#inspector').innerText")
    assert len(texts(browser, "#timeline rect.unit.on")) == 2  # of the host and of the device


def test_the_time_that_no_unit_has(show, mixed):
    """It is shown beside wall times alone: of other kinds, it is no rest."""
    run = {"run_us": 200.0, "runs": 5, "coverage": 0.6, "outside_us": 80.0, "outside": {"call": 6.0}, "cut_us": 9.0}
    latency = msgspec.structs.replace(LATENCY, detail={"instrumented": run})
    both = msgspec.structs.replace(mixed, latency=latency)
    assert show(both).evaluate("document.querySelectorAll('#outside').length") == 0
    wall = tuple(u for u in mixed.units if u.time is None or u.time.kind == "wall")
    browser = show(msgspec.structs.replace(both, units=wall))
    row = browser.evaluate("document.querySelector('#outside').innerText")
    assert row.split("\n")[0].startswith("outside of units")
    assert "(call 6.0, cut off at most 9.0)" in row
    assert "80.0 us" in row


def test_every_part_of_the_report_is_there(show, mixed):
    browser = show(mixed)
    browser.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    shown = browser.evaluate("document.querySelector('main').innerText")
    for text in ("cuda:0 -> cpu", "4.8 MiB", "not C-contiguous", "3.0 MiB", "CPython 3.11", "numpy", "OMP_NUM_THREADS",
                 "libx.so", "times are the host's", mixed.command, "nothing (not of the model)"):  # fmt: skip
        assert text in shown


def test_printing_opens_what_is_folded_away(show, mixed):
    browser = show(mixed)
    browser.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert browser.evaluate("document.querySelectorAll('details:not([open])').length") == 0
    browser.evaluate("dispatchEvent(new Event('afterprint'))")
    assert browser.evaluate("document.querySelectorAll('details[open]').length") == 0
    browser.prefer("dark", media="print")
    assert browser.evaluate("getComputedStyle(document.querySelector('.bar')).display") == "none"
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.pdf().startswith(b"%PDF")
    browser.prefer("light")


def test_text_of_a_report_runs_nowhere(show):
    browser = show(hostile())
    assert browser.complaints == []
    assert browser.evaluate("window.hit") is None
    assert browser.evaluate("document.querySelectorAll('img, svg[onload]').length") == 0
    assert HOSTILE in texts(browser, "#policy td")
    browser.click("#graph .box rect")
    assert browser.evaluate("document.querySelector('#inspector h2').textContent") == HOSTILE
    for colour in ("precision", "time", "status"):
        browser.click(f"[data-colour={colour}]")
    assert browser.evaluate("window.hit") is None


def test_names_without_end_do_not_widen_the_page(show, tmp_path):
    with InferenceSession(long_named_model(tmp_path / "long.onnx"), device="cpu", engine="onnxruntime") as session:
        report = session.explain(runs=1)
    for shown in (report, compare_reports(report, msgspec.structs.replace(report, units=report.units[:1]))):
        browser = show(shown)
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    browser = show(report)
    browser.click("#graph .box rect")
    assert browser.evaluate("document.querySelector('#inspector').scrollWidth <= innerWidth")
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_sections_with_nothing_to_show_are_one_list(show, mixed):
    browser = show(msgspec.structs.replace(mixed, conversions=(), determinism=None))
    assert browser.evaluate("document.querySelector('#conversions').hidden") is True
    assert browser.evaluate("document.querySelectorAll('#nav a[href=\"#conversions\"]').length") == 0
    assert any("arrays and model went in as they were" in text for text in texts(browser, "#notes li"))


def test_long_times_are_in_the_unit_that_is_easy_to_read(show, mixed):
    latency = msgspec.structs.replace(LATENCY, median_us=17_341.2)
    browser = show(msgspec.structs.replace(mixed, latency=latency))
    assert "17.3 ms" in browser.evaluate("document.querySelector('.facts').innerText")


def test_a_report_of_nothing_says_so(show):
    browser = show(Report())
    assert browser.complaints == []
    told = ("policy", "time", "timeline", "graph", "units", "precision", "boundaries", "conversions", "memory")
    for section in (*told, "cuda-graph", "shapes"):
        assert len(texts(browser, f"#{section} .none")) == 1


@pytest.fixture
def large(show, deep):
    return show(deep)


def test_two_thousand_nodes_are_grouped_and_open_on_demand(large, deep):
    first = large.evaluate("document.querySelectorAll('#graph .box').length")
    assert first == large.evaluate("document.querySelectorAll('#graph .group-box').length") == 250
    large.click("#graph .group-box rect")
    assert "8\n" in large.evaluate("document.querySelector('#inspector').innerText")
    large.click("#inspector .row button")
    assert large.evaluate("document.querySelectorAll('#graph .box').length") > first
    large.choose("#detail", "Infinity")
    drawn(large)
    assert large.evaluate("document.querySelector('#graph .sheet').hidden") is False  # all of it, as pixels
    assert large.evaluate("document.querySelectorAll('#graph .box').length") == 0
    painted = (
        "(() => { const s = document.querySelector('#graph .sheet'); const d = s.getContext('2d')"
        ".getImageData(0, 0, s.width, s.height).data; let n = 0; for (let i = 3; i < d.length; i += 4) n += d[i] > 0;"
        "return n / (d.length / 4); })()"
    )
    assert 0.005 < large.evaluate(painted) < 1


def drawn(browser) -> None:
    """Wait until a large graph is laid out and painted."""
    browser.evaluate(
        "new Promise(done => { const look = () => document.querySelector('#graph .canvas svg') ? "
        "requestAnimationFrame(() => requestAnimationFrame(done)) : setTimeout(look, 10); look(); })"
    )


def test_a_node_of_two_thousand_is_searched_and_shown(large, deep):
    name = deep.graph[1500].name
    large.evaluate("document.activeElement.blur()")
    large.press("/")
    assert large.evaluate("document.activeElement.type") == "search"
    large.type(name)
    assert "1 node found" in large.evaluate("document.querySelector('#graph [role=status]').textContent")
    large.press("Enter")
    drawn(large)
    assert large.evaluate("document.querySelector('#graph .box.at title').textContent").startswith(f"{name},")
    assert name in large.evaluate("document.querySelector('#inspector').innerText")
    large.type("nothing of this name")
    assert "0 nodes found" in large.evaluate("document.querySelector('#graph [role=status]').textContent")


def test_the_map_says_where_the_view_is_and_moves_it(large):
    where = "document.querySelector('.canvas svg > g').getAttribute('transform')"
    assert large.evaluate("document.querySelector('#graph .minimap').hidden") is True  # all of it is in view
    for _ in range(6):
        large.click(".zoom button:nth-child(2)")
    assert large.evaluate("document.querySelector('#graph .minimap').hidden") is False
    before = large.evaluate(where)
    large.click("#graph .minimap")
    assert large.evaluate(where) != before


def test_two_thousand_nodes_overlap_nowhere_and_look_the_same_each_time(large, show, deep):
    large.choose("#detail", "Infinity")
    drawn(large)
    for _ in range(8):
        large.click(".zoom button:nth-child(2)")
    shown = large.evaluate("document.querySelectorAll('#graph .box').length")
    assert 4 < shown < 600  # those in view alone
    overlaps = large.evaluate(
        "(() => { const rows = new Map(); for (const box of document.querySelectorAll('#graph .box')) {"
        "const [, x, y] = box.getAttribute('transform').match(/translate\\(([-\\d.]+) ([-\\d.]+)/).map(Number);"
        "const w = Number(box.querySelector('rect').getAttribute('width'));"
        "if (!rows.has(y)) rows.set(y, []); rows.get(y).push([x - w / 2, x + w / 2]); }"
        "let found = 0; for (const row of rows.values()) { row.sort((a, b) => a[0] - b[0]);"
        "for (let i = 1; i < row.length; i += 1) if (row[i][0] < row[i - 1][1]) found += 1; } return found; })()"
    )
    assert overlaps == 0
    drawing = "[...document.querySelectorAll('#graph .wires')].map(w => w.getAttribute('d')).join()"
    first = zlib.crc32(large.evaluate(drawing).encode())
    show(deep)
    large.choose("#detail", "Infinity")
    drawn(large)
    for _ in range(8):
        large.click(".zoom button:nth-child(2)")
    assert zlib.crc32(large.evaluate(drawing).encode()) == first


def test_a_large_page_builds_few_elements_at_once(large, deep):
    """What a task builds does not grow with the model: rows and boxes come as they are asked for or scrolled to."""
    assert len(deep.units) > 1000
    assert large.evaluate("document.querySelectorAll('#units tbody tr').length") <= 100
    assert large.evaluate("document.querySelectorAll('main *').length") < 6 * len(deep.graph)


def test_two_thousand_nodes_are_filtered_and_sorted(large, deep):
    units = len(deep.units)
    large.evaluate(
        "const search = document.querySelector('#units input'); search.value = 'blocks.17/';"
        "search.dispatchEvent(new Event('input'));",
    )
    names = large.evaluate("[...document.querySelectorAll('#units tbody tr')].map(r => r.cells[2].title)")
    assert 0 < len(names) < 20
    assert all("blocks.17/" in name for name in names)
    large.click("#units .row > button")
    large.evaluate("[...document.querySelectorAll('#units > .body > .row:last-child button')].pop().click()")
    assert len(column(large, UNIT)) == units
    large.click(head(TIME))


def test_units_that_share_a_pixel_are_one_bar_of_memory(large, deep):
    bars = "[...document.querySelectorAll('#memory .live rect')].map(bar => +bar.getAttribute('height'))"
    high = large.evaluate(bars)
    assert 100 < len(high) <= large.evaluate("document.querySelector('#memory .live').clientWidth")
    assert (
        max(high)
        == high[large.evaluate("[...document.querySelectorAll('#memory .live rect')].findIndex(e => e.matches('.k1'))")]
    )
    large.click("#units tbody tr .link")
    assert large.evaluate("document.querySelectorAll('#memory .live rect.on').length") == 1
