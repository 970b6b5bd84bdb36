# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Tests of operations on a device; what holds for all GPU tests is in the folder above."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

#: These modules cannot be imported without PyTorch.
collect_ignore_glob = [] if importlib.util.find_spec("torch") is not None else ["test_*_gpu.py"]


@pytest.fixture(autouse=True)
def fresh_dispatcher() -> Iterator[None]:
    """No measured times of other tests, no file to keep them in, and nothing left running."""
    import torch

    from xpuruntime import _core
    from xpuruntime.ops.ambient import prepare
    from xpuruntime.ops.tuning_cache import use_tuning_cache

    prepare()
    dispatcher = _core.Dispatcher.instance()
    dispatcher.set_tuning_store(None)
    dispatcher.forget_measurements()
    dispatcher.clear_decisions()
    yield
    torch.cuda.synchronize()
    use_tuning_cache()
