# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Where trials are made, whose outcome is kept for as long as the process lives: `undisturbed`, `find_out`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["find_out", "undisturbed"]


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Have what runs inside be real, on plain tensors, whatever the caller traces, transforms or records.

    Neither modes of PyTorch's nor a device of its default are seen, nor transforms of ``torch.func``, nor what
    ``torch.jit.trace`` writes down.
    """
    traced = torch._C._get_tracing_state()
    transformed = torch._C._are_functorch_transforms_active()
    if traced is not None:  # PyTorch refuses to set it in kernels that a transform has called
        torch._C._set_tracing_state(None)
    try:
        with (
            # Where nothing is transformed, asking for the stack would have PyTorch make one for this thread.
            temporarily_clear_interpreter_stack() if transformed else contextlib.nullcontext(),
            _disable_current_modes(),
            torch._C.DisableTorchFunction(),
            torch.inference_mode(mode=False),
            torch.enable_grad(),
        ):
            yield
    finally:
        if traced is not None:
            torch._C._set_tracing_state(traced)


def find_out(trial: Callable[[], str]) -> str:
    """Return what a trial finds against a part of PyTorch's; an error in it is a finding, too."""
    try:
        with undisturbed():
            return trial()
    except Exception as error:
        return f"this PyTorch failed in a trial: {type(error).__name__}: {error}"
