# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Tests of operations on a device; what holds for all GPU tests is in the folder above."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

#: These modules cannot be imported without PyTorch.
collect_ignore_glob = [] if importlib.util.find_spec("torch") is not None else ["test_*_gpu.py"]


@pytest.fixture(scope="session", autouse=True)
def _contexts_for_autograd() -> None:
    """Let PyTorch's threads for gradients launch a kernel: it gives them the context that cuBLAS warns of lacking."""
    import torch

    for index in range(min(torch.cuda.device_count(), 2)):
        x = torch.ones(8, device=f"cuda:{index}", requires_grad=True)
        (x * x).sum().backward()
        torch.cuda.synchronize(index)


@pytest.fixture(autouse=True)
def fresh_dispatcher() -> Iterator[None]:
    """No measured times of other tests, no file to keep them in, and nothing left running."""
    import torch

    from xpuruntime import _core
    from xpuruntime.ops.call_context import prepare
    from xpuruntime.ops.tuning_cache import use_tuning_cache

    prepare()
    dispatcher = _core.Dispatcher.instance()
    dispatcher.set_tuning_store(None)
    dispatcher.forget_measurements()
    dispatcher.clear_decisions()
    yield
    torch.cuda.synchronize()
    use_tuning_cache()
