# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""For tests of operations: nothing measured, recorded or kept by other tests, and kernels that tell what they see."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from recording_kernel import Backend, Recorder

from xpuruntime import _core
from xpuruntime.ops.call_context import prepare


@pytest.fixture(autouse=True)
def fresh_dispatcher() -> _core.Dispatcher:
    prepare()
    dispatcher = _core.Dispatcher.instance()
    dispatcher.set_tuning_store(None)
    dispatcher.forget_measurements()
    dispatcher.clear_decisions()
    return dispatcher


@pytest.fixture
def recorder() -> Iterator[Callable[[str], Recorder]]:
    """Make a `Recorder` for an operation; all are removed afterwards."""

    def make(op: str) -> Recorder:
        kernel = Recorder(op)
        _core.register_python_kernel(Backend(), kernel)
        return kernel

    yield make
    _core.KernelRegistry.instance().remove("recording")
