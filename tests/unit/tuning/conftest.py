# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What the tests of the tuner share: an engine that is installed as a plugin."""

from __future__ import annotations

from pathlib import Path

import pytest

from xpuruntime.engines import registry

HERE = Path(__file__).resolve().parent


@pytest.fixture
def planted_plugin(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Install the engine ``planted`` for this process and for workers."""
    folder = tmp_path_factory.mktemp("site")
    info = folder / "planted-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[xpuruntime.engines]\nplanted = planted_engines:PlantedEngine\n")
    import os

    inherited = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(HERE), *filter(None, [inherited])]))
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(registry, "_default", None)
    monkeypatch.setattr(registry, "_partial", None)
