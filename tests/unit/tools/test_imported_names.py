# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Names that programs outside of the package import from it, in files that most runs of the tests do not execute."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("benchmarks", "examples", "tests/gpu", "tools")


def imported(folder: str) -> Iterator[tuple[str, str, str]]:
    """Yield the place of an import, the module, and a name that is imported from it."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "xpuruntime":
                for name in node.names:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", str(node.module), name.name


def exists(module: str, name: str) -> bool:
    """Whether a module has a name, or a module below it."""
    try:
        if hasattr(importlib.import_module(module), name):
            return True
        importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError as error:
        return not str(error.name).startswith("xpuruntime")  # else a vendor's package is not installed
    except ImportError as error:
        return "requires PyTorch" in str(error)
    return True


@pytest.mark.parametrize("folder", FOLDERS)
def test_imported_names_exist(folder: str) -> None:
    found = list(imported(folder))
    assert found, folder
    assert [f"{where}: {name} of {module}" for where, module, name in found if not exists(module, name)] == []
