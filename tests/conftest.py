# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What every test relies on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest


def pytest_configure(config: pytest.Config) -> None:
    # These tests tell what happens without a GPU, where a session takes the CPU by itself.
    if any({"unit", "conformance"}.intersection(Path(one.partition("::")[0]).parts) for one in config.args):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # A shell that starts a job in the background has it ignore Ctrl-C, and every process below inherits that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


#: What a core may be built without, and how to build it with that.
_BUILDS = {
    "cuda": "needs a core built with CUDA: put nvcc on the path and run `make install`",
    "cublas": "needs a core built with cuBLAS: with nvcc on the path, run `make cuda-headers install`",
    "cudnn": "needs a core built with cuDNN: with nvcc on the path, run `make cuda-headers install`",
}


def pytest_runtest_setup(item: pytest.Item) -> None:
    from xpuruntime import _core

    for mark in item.iter_markers("needs_build"):
        for part in mark.args:
            if not _core.build_info()[part]:
                pytest.skip(_BUILDS[part])


@pytest.fixture
def nothing_is_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """PyTorch's kernels have not been measured against ours; returns where their times are kept."""
    from xpuruntime.pytorch import tuning

    path = tmp_path / "tuning.json"
    monkeypatch.setenv("XPURUNTIME_TUNING_CACHE", str(path))
    monkeypatch.setattr(tuning, "_known", {})
    monkeypatch.setattr(tuning, "_store_is_open", False)
    return path
