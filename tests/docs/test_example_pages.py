# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The pages of ``docs/examples``: rendered again they keep their data, and a page that is rendered stays as it is."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tools"))

from render_examples import rendered  # noqa: E402 - it needs the path

import xpuruntime as xrt  # noqa: E402

PAGES = sorted((ROOT / "docs" / "examples").glob("*.html"))


def data(page: str) -> dict[str, object]:
    text = page.partition('<script type="application/json" id="data">')[2].partition("</script>")[0]
    results: dict[str, object] = msgspec.json.decode(text)
    return results


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_an_example_keeps_its_data_and_a_rendered_page_stays(path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    again = rendered(page)
    assert data(again) == data(page)
    assert rendered(again) == again


def test_a_report_of_today_is_rendered_to_itself_and_has_no_data_that_examples_lack() -> None:
    assert PAGES
    with xrt.InferenceSession(xrt.demo_model_path(), device="cpu", engine="onnxruntime") as session:
        page = session.explain(runs=1).to_html()
    assert rendered(page) == page
    assert all(set(data(page)) <= set(data(path.read_text(encoding="utf-8"))) for path in PAGES)


def test_another_page_is_refused() -> None:
    with pytest.raises(ValueError, match="no page of a report"):
        rendered("<html></html>")
