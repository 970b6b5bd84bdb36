# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What the tests of determinism share."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


@pytest.fixture
def planted_everywhere(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let fresh processes know the planted kernels too, as they know those of an installed package."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "sitecustomize.py").write_text("import planted\n")
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{HERE}")
