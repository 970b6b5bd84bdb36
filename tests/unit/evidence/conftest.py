# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Reports that several tests of the page look at, and a browser."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
from chromium import Browser, find_chromium
from evidence_records import BOUNDARY, CONVERSION, LATENCY, control, unit
from page_models import deep_model

from xpuruntime.engines.base import Observed
from xpuruntime.evidence import SourceNode, Time, build_report
from xpuruntime.inference import InferenceSession
from xpuruntime.runtime.machine import Library

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from xpuruntime.evidence import Report, ReportComparison
    from xpuruntime.inference import Comparison


@pytest.fixture(scope="session")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Return ONNX Runtime's report of a model with 2,000 nodes."""
    folder = tmp_path_factory.mktemp("deep")
    path = deep_model(folder / "deep.onnx", 2000)
    with InferenceSession(path, device="cpu", engine="onnxruntime") as session:
        return session.explain(runs=2)


@pytest.fixture
def mixed() -> Report:
    """A policy that was not honoured: two devices, two precisions, two kinds of time, a fused and a folded unit."""
    cycles = Time(value=5_000_000.0, unit="cycles", kind="cycles", runs=3)
    units = (
        unit("stem/conv", op="Conv", device="cuda:0", ran="fp16", asked="fp16", time=80.0),
        unit("stem/relu", op="Relu", device="cpu", ran="fp32", asked="fp16", time=5.0, status="substituted"),
        unit(
            "copy",
            op="MemcpyToHost",
            relation="inserted",
            device="cuda:0",
            asked=None,
            time=15.0,
            serves=("stem/relu",),
        ),
        unit(
            "body+add",
            op="FusedAdd",
            relation="fused",
            source_nodes=("body/mul", "body/add"),
            device="cuda:0",
            time=20.0,
        ),
        unit("shape", op="Shape", relation="folded", device="cuda:0", time=None),
        unit("island", op="Partition", relation="opaque", source_nodes=("head",), device="npu", time=None),
    )
    units = (*units[:-1], msgspec.structs.replace(units[-1], time=cycles))
    graph = tuple(
        SourceNode(name=name, op=op, inputs=inputs, outputs=(f"{name}_y",))
        for name, op, inputs in (
            ("stem/conv", "Conv", ("x",)),
            ("stem/relu", "Relu", ("stem/conv_y",)),
            ("shape", "Shape", ("x",)),
            ("body/mul", "Mul", ("stem/relu_y", "shape_y")),
            ("body/add", "Add", ("body/mul_y", "stem/conv_y")),
            ("head", "MatMul", ("body/add_y",)),
        )
    )
    return build_report(
        {"engine": "onnxruntime", "device": "cuda:0", "model": {"path": "models/mixed.onnx", "nodes": 6, "size": 4096}},
        [control("execution.tf32", "true"), control("kernels.conv", "cudnn", "-", "unsupported")],
        Observed(units=units, boundaries=(BOUNDARY,), notes=("times are the host's",), partial=True),
        device="cuda:0",
        conversions=[CONVERSION],
        latency=LATENCY,
        memory={"weights": 3 << 20, "pool": 1 << 20},
        libraries=[Library(name="libx.so", path="/x/libx.so", version="1.2", origin="pip")],
        command="xrt explain models/mixed.onnx --device cuda:0",
        environment={"python": "CPython 3.11", "packages": {"numpy": "2.0"}, "variables": {"OMP_NUM_THREADS": "2"}},
        graph=graph,
    )


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find_chromium()
    if program is None:
        pytest.skip("needs Chromium or Chrome on PATH: apt-get install chromium")
    browser = Browser(program, tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture
def show(browser: Browser, tmp_path: Path):
    """Open the page of a report, or of a comparison."""

    def show(shown: Report | Comparison | ReportComparison) -> Browser:
        browser.prefer("light")
        browser.open(shown.save_html(tmp_path / "page.html"))
        assert browser.evaluate("document.documentElement.dataset.ready") == "true"
        return browser

    return show


@pytest.fixture
def look(browser: Browser, show):
    """Open a page that asks for nothing but itself and has nothing to complain of."""
    yield show
    assert [url.partition(":")[0] for url in browser.requests] == ["file"]
    assert browser.complaints == []
