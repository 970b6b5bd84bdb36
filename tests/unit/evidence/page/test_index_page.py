# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The page of an index in a real browser."""

from __future__ import annotations

from xpuruntime.locks.folder_index import FolderIndex, IndexedFile, OddFact

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
