# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Make the pictures of README and of the documentation from real runs: ``python tools/pictures.py``.

It needs Chromium, OpenVINO and the packages of ``xrt serve``. Each is of a page that a command writes: a report with a
deviation, a verification that fails, a search, the drift of engines, what differs between two reports, an index of
reports, and a benchmark; one is the status page of a server.
"""

from __future__ import annotations

import base64
import contextlib
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import xpuruntime as xrt
from xpuruntime.demo import write_demo_files

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "unit" / "evidence"))

from chromium import Browser, find_chromium  # noqa: E402

ASSETS = ROOT / "docs" / "assets"
#: Scrolls to an element, and waits until that is drawn.
_SHOW = """new Promise(done => { document.querySelector('%s').scrollIntoView({behavior: 'instant'});
  requestAnimationFrame(() => requestAnimationFrame(done)); })"""
_BENCH = "bench model.onnx --device cpu"
#: Commands by the picture that they make: exit codes and words. On a machine that is not quiet a search ends undecided.
_RUNS: dict[str, list[tuple[tuple[int, ...], str]]] = {
    "report": [((1,), "explain model.onnx --device cpu --precision fp16 --html report.html")],
    "verification": [
        ((0,), "lock model.onnx --policy policy.yaml -o model.lock"),
        ((1,), "verify retrained.onnx --lock model.lock --only evidence --html verification.html"),
    ],
    "search": [((0, 4), "tune model.onnx --input samples.npz --device cpu --budget 30s --html search.html")],
    "drift": [((1,), "compare model.onnx --engines onnxruntime,openvino,null --device cpu --html drift.html")],
    "changes": [
        ((0,), "explain model.onnx --device cpu --output before.json"),
        ((0,), "explain model.onnx --device cpu --engine openvino --output after.json"),
        ((1,), "explain before.json after.json --html changes.html"),
    ],
    "index": [
        ((0,), "explain model.onnx --device cpu --output fleet/node-a.json"),
        ((0,), "explain model.onnx --device cpu --output fleet/node-b.json"),
        ((0,), "explain model.onnx --device cpu --engine openvino --output fleet/node-c.json"),
        ((0, 1), "index fleet --html index.html"),
    ],
    "benchmark": [
        ((0,), f"{_BENCH} --engine openvino --json > openvino.json"),
        ((0,), f"{_BENCH} --engine onnxruntime --against openvino.json --html benchmark.html"),
    ],
    "serving": [],
}
#: Width and height of the window.
_SIZE = (1240, 750)
#: Where a picture begins that does not begin at the top of the page.
_PLACES = {"search": "#front", "drift": "#drift"}


def reader_files(folder: Path) -> None:
    """Put into a folder what the pages of the documentation name: models, a policy and samples."""
    write_demo_files(folder)
    np.savez(folder / "samples.npz", image=xrt.demo_images()[0][:64])


def served(path: Path) -> None:
    """Write the status page of a server with two models, of which one has a lock."""
    from xpuruntime.serving.messages import InferRequest, InferTensor
    from xpuruntime.serving.models.service import Models
    from xpuruntime.serving.models.settings import ServeSettings
    from xpuruntime.serving.monitoring.pages import status_page

    model, images = str(path.with_name("model.onnx")), xrt.demo_images()[0]
    settings = ServeSettings.coerce({
        "schema": "xpuruntime.serve/1",
        "memory": {"budget": {"cpu": "4GiB"}},
        "models": {
            "digits": {"source": model, "lock": str(path.with_name("model.lock")), "batching": {"max_batch_size": 8}},
            "retrained": {"source": str(path.with_name("retrained.onnx"))},
        },
    })  # fmt: skip
    with Models(settings) as service:
        for name, size in (("digits", 1), ("digits", 4), ("digits", 8), ("digits", 8), ("retrained", 2)):
            image = images[:size]
            service.infer(InferRequest(name, [InferTensor("image", "FP32", image.shape, image)])).result(60)
        path.write_text(status_page(service), encoding="utf-8")


def main() -> int:
    """Run the commands and take the pictures."""
    program = find_chromium()
    if program is None:
        print("no Chromium on PATH. Fix: apt-get install chromium")
        return 3
    with tempfile.TemporaryDirectory() as name, contextlib.closing(Browser(program, Path(name, "browser"))) as browser:
        folder = Path(name)
        reader_files(folder)
        (folder / "fleet").mkdir()
        browser.resize(*_SIZE)
        browser.call("Emulation.setScrollbarsHidden", hidden=True)
        for picture, commands in _RUNS.items():
            for codes, words in commands:
                done = subprocess.run(
                    f"{shlex.quote(str(Path(sys.executable).with_name('xrt')))} {words}",
                    shell=True, cwd=folder, capture_output=True, text=True, check=False,
                )  # fmt: skip
                if done.returncode not in codes:
                    print(f"xrt {words}: exit code {done.returncode}\n{done.stderr}")
                    return 1
            if picture == "serving":
                served(folder / "serving.html")
            target = ASSETS / f"{picture}.png"
            browser.open(folder / f"{picture}.html")
            browser.evaluate(_SHOW % _PLACES.get(picture, "#top"))
            target.write_bytes(base64.b64decode(browser.call("Page.captureScreenshot")["data"]))
            print(f"{target.relative_to(ROOT)}: {target.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
