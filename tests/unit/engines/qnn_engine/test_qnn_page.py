# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The page of vendor options holds the chips and the options of QNN that the code holds."""

from __future__ import annotations

import re
from pathlib import Path

from xpuruntime.engines.qnn.options import GRAPH_OPTIONS, OPTIONS, SOCS, TARGET_OPTIONS

DOCS = Path(__file__).resolve().parents[4] / "docs"
PAGE = (DOCS / "reference" / "options.md").read_text(encoding="utf-8")


def test_chips() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| (\d+) \| (\d+|\?) \| (.+?) \|$", PAGE, re.MULTILINE)
    assert [(name, int(model), int(arch), vtcm, product) for name, model, arch, vtcm, product in rows] == [
        (name, one.soc_model, one.htp_arch, str(one.vtcm_mb or "?"), one.product or "-") for name, one in SOCS.items()
    ]


def test_options() -> None:
    tables = PAGE.split("\n## QNN\n")[1].split("\n### QNN: chips\n")[0]
    own = {name for name, option in {**TARGET_OPTIONS, **GRAPH_OPTIONS, **OPTIONS}.items() if option.owned_by is None}
    assert set(re.findall(r"^\| `(\w+)` ", tables, re.MULTILINE)) == own
    for name, option in OPTIONS.items():
        if option.owned_by is not None:
            assert f"`{name}` ({option.owned_by})" in tables
        assert option.owned_by is not None or option.meaning in tables
