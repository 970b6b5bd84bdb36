# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Python functions that the C++ of PyTorch's fast path imports by name are there, with and without the addon."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

pytest.importorskip("torch")

_SOURCES = Path(__file__).parents[3] / "src/cpp/torch"
_IMPORT = re.compile(r'imported\(\s*"([\w.]+)",\s*"(\w+)"\)')


def test_what_the_addon_imports_is_there() -> None:
    found = {match for path in _SOURCES.rglob("*.cpp") for match in _IMPORT.findall(path.read_text())}
    assert len(found) > 3, "the pattern finds none of them"
    for module, name in sorted(found):
        assert callable(getattr(importlib.import_module(module), name, None)), f"{module} has no {name}"
