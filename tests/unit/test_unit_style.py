# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Units of time in what the package prints and writes: microseconds are ``us``, which every terminal can show."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import xpuruntime as xrt

ROOT = Path(xrt.__file__).parent
#: The micro sign, and the Greek letter that looks like it.
MICRO = ("\u00b5", "\u03bc", "&micro;", "\\u00b5", "\\u03bc")


def test_no_source_of_the_package_writes_the_micro_sign() -> None:
    files = [path for kind in ("py", "js", "html", "css") for path in ROOT.rglob(f"*.{kind}")]
    assert {path.suffix for path in files} == {".py", ".js", ".html", ".css"}
    texts = [
        f"{path.relative_to(ROOT)}: {sign!r}"
        for path in files
        for sign in MICRO
        if sign in path.read_text(encoding="utf-8")
    ]
    assert not texts


def test_reports_and_their_pages_have_one_unit(tmp_path: Path) -> None:
    with xrt.InferenceSession(xrt.demo_model_path(), device="cpu", engine="onnxruntime") as session:
        report = session.explain({"image": np.ones((8, 1, 8, 8), np.float32)}, runs=3)
    page = tmp_path / "report.html"
    report.save_html(page)
    texts = {"text": str(report), "page": page.read_text(encoding="utf-8"), "notebook": report._repr_html_()}
    for name, text in texts.items():
        assert " us" in text, name
        assert not [sign for sign in MICRO if sign in text], name
