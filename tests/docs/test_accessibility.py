# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""axe-core finds nothing on pages of the built documentation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from chromium import Browser, axe_script, find_chromium

if TYPE_CHECKING:
    from collections.abc import Iterator

SITE = Path(__file__).resolve().parents[2] / "site"
#: Pages that have between them all that pages are made of.
WIDE = ("quickstart", "guides/reports", "reference/python/inference", "results/benchmarks/targets", "ko/index")
NARROW = ("index", "tour", "guides/pytorch", "reference/cli", "reference/python/generation")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find_chromium()
    if program is None:
        pytest.skip("needs Chromium or Chrome on PATH: apt-get install chromium")
    browser = Browser(program, tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.mark.parametrize(
    ("page", "width", "scheme"),
    [*((page, 1280, "default") for page in WIDE), *((page, 390, "slate") for page in NARROW)],
)
def test_axe_finds_nothing(browser: Browser, page: str, width: int, scheme: str) -> None:
    axe, path = axe_script(), SITE / f"{page}.html"
    if axe is None:
        pytest.skip("needs axe-core: pip install --no-deps --group accessibility-no-deps")
    if not path.exists():
        pytest.skip("needs the built documentation: make docs")
    browser.resize(width, 900)
    browser.open(path)
    browser.evaluate(f"document.body.setAttribute('data-md-color-scheme', '{scheme}')")
    assert browser.accessibility_findings(axe) == []
