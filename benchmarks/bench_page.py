# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The longest tasks of the page of a report with 10,000 nodes, in Chromium, from its performance trace.

A task holds the page while it runs. The processor time of the main thread is measured, so that other programs on the
machine count little; the load of the machine is stated.

python benchmarks/bench_page.py
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xpuruntime as xrt
from harness import write

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "unit" / "evidence"))

from chromium import Browser, find_chromium  # noqa: E402
from page_models import deep_model  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

#: Milliseconds of one task.
TARGET = 200.0
_ALL = """(() => { const s = document.querySelector('#detail'); s.value = 'Infinity';
  s.dispatchEvent(new Event('change')); })()"""
_DRAWN = """new Promise((done) => { const look = () => document.querySelector('#graph .canvas svg')
  ? requestAnimationFrame(() => requestAnimationFrame(done)) : setTimeout(look, 10); setTimeout(look, 50); })"""
_SEARCH = """(() => { const s = document.querySelector('#graph input[type=search]'); s.value = '7/attn';
  s.dispatchEvent(new Event('input')); })()"""
_FILTER = """(() => { const s = document.querySelector('#units input'); s.value = 'blocks.17/';
  s.dispatchEvent(new Event('input')); })()"""
_ZOOM = "document.querySelector('.zoom button:nth-child(2)').click()"
_THEME = "document.querySelector('#theme').click()"
#: What a reader does, in order.
STEPS = {
    "draw all": (_ALL,),
    "zoom": (_ZOOM,) * 6,
    "search the graph": (_SEARCH,),
    "filter the units": (_FILTER,),
    "change the theme": (_THEME,),
}


class Tracing(Browser):
    """A browser that returns the tasks of the main thread of its page."""

    def _note(self, method: str, facts: dict[str, Any]) -> None:
        super()._note(method, facts)
        if method == "Tracing.tracingComplete":
            self.stream = facts["stream"]

    def longest_task(self, step: Callable[[], Any]) -> float:
        """Return milliseconds of processor time of the longest task while a step runs."""
        self.stream = None
        kinds = ["toplevel", "disabled-by-default-devtools.timeline", "devtools.timeline", "__metadata"]
        config = {"includedCategories": kinds, "recordMode": "recordUntilFull"}
        self.call("Tracing.start", transferMode="ReturnAsStream", traceConfig=config)
        step()
        self.call("Tracing.end")
        while self.stream is None:
            self._next()
        text = b""
        while True:
            part = self.call("IO.read", handle=self.stream)
            data = part["data"]
            text += base64.b64decode(data) if part.get("base64Encoded") else data.encode()
            if part["eof"]:
                break
        events = json.loads(text)["traceEvents"]
        main = {(e["pid"], e["tid"]) for e in events if e.get("args", {}).get("name") == "CrRendererMain"}
        return max(
            e.get("tdur", e["dur"]) / 1e3
            for e in events
            if e.get("ph") == "X" and e["name"].endswith("RunTask") and (e["pid"], e["tid"]) in main
        )


def read_through(program: str, page: Path, profile: Path) -> dict[str, float]:
    """Return milliseconds of the longest task of each step of a reader, in a new browser."""
    browser = Tracing(program, profile)

    def act(*actions: str) -> None:
        for action in actions:
            browser.evaluate(action)
        browser.evaluate(_DRAWN)

    def opened() -> None:
        browser.open(page)
        act()

    try:
        found = {"load": browser.longest_task(opened)}
        return found | {name: browser.longest_task(partial(act, *actions)) for name, actions in STEPS.items()}
    finally:
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out")
    options = parser.parse_args()
    program = find_chromium()
    if program is None:
        raise SystemExit("no Chromium on PATH. Fix: apt-get install chromium")
    longest: dict[str, list[float]] = {name: [] for name in ("load", *STEPS)}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        model = deep_model(folder / "deep.onnx", options.nodes)
        with xrt.InferenceSession(model, device="cpu", engine="onnxruntime") as session:
            report = session.explain(runs=2)
        page = folder / "report.html"
        report.save_html(page)
        for _ in range(options.rounds):
            for name, milliseconds in read_through(program, page, Path(tempfile.mkdtemp(dir=folder))).items():
                longest[name].append(milliseconds)
        size = page.stat().st_size
    load = os.getloadavg()[0]
    for name, values in longest.items():
        print(f"{name:18} longest task {min(values):7.1f} to {max(values):7.1f} ms of processor time")
    print(
        f"{options.nodes:,} nodes, {len(report.units):,} units, a page of {size / 1e6:.1f} MB, load average {load:.1f}"
    )
    body = {"nodes": options.nodes, "units": len(report.units), "bytes": size, "load_average": load}
    write("page_cpu", {**body, "rounds": options.rounds, "longest_ms": longest, "target_ms": TARGET}, options.out)


if __name__ == "__main__":
    main()
