# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""One-time self-tests of PyTorch, whose results are kept for the process: `isolated_context`, `self_test`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from xpuruntime.pytorch import _private_api

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["isolated_context", "self_test"]


@contextlib.contextmanager
def isolated_context() -> Iterator[None]:
    """Have what runs inside be real, on plain tensors, whatever the caller traces, transforms or records.

    Neither modes of PyTorch's nor a device of its default are seen, nor transforms of ``torch.func``, nor what
    ``torch.jit.trace`` writes down.
    """
    traced = _private_api.tracing_state()
    transformed = _private_api.has_transforms()
    if traced is not None:  # PyTorch refuses to set it in kernels that a transform has called
        _private_api.set_tracing_state(None)
    try:
        with (
            # Where nothing is transformed, asking for the stack would have PyTorch make one for this thread.
            _private_api.without_transforms() if transformed else contextlib.nullcontext(),
            _private_api.without_modes(),
            _private_api.without_torch_function(),
            torch.inference_mode(mode=False),
            torch.enable_grad(),
        ):
            yield
    finally:
        if traced is not None:
            _private_api.set_tracing_state(traced)


def self_test(test: Callable[[], str]) -> str:
    """Return why a part of PyTorch cannot be used, as `test` finds; an error in it is a reason, too."""
    try:
        with isolated_context():
            return test()
    except Exception as error:
        return f"this PyTorch failed in a self-test: {type(error).__name__}: {error}"
