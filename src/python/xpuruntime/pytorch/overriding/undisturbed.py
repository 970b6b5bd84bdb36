# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`undisturbed`: for trials, whose outcome is kept for as long as the process lives, wherever they are made."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["undisturbed"]


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Have what runs inside be real, on plain tensors, whatever the caller traces, transforms or records.

    Neither modes of PyTorch's nor a device of its default are seen, nor transforms of ``torch.func``, nor what
    ``torch.jit.trace`` writes down.
    """
    traced = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)
    try:
        with (
            temporarily_clear_interpreter_stack(),
            _disable_current_modes(),
            torch._C.DisableTorchFunction(),
            torch.inference_mode(mode=False),
            torch.enable_grad(),
        ):
            yield
    finally:
        torch._C._set_tracing_state(traced)
