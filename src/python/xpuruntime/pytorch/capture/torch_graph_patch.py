# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Captures by ``torch.cuda.graph`` itself, after a warm-up whose results are still alive."""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch

from xpuruntime.pytorch.capture.grad_accumulators import forget_accumulators, leaves_on
from xpuruntime.pytorch.dispatch.context import CONTEXT

__all__ = ["release", "require"]

_lock = threading.Lock()
_original: Any = None


def require() -> None:
    """Let ``with torch.cuda.graph(g):`` capture a backward pass although a loss of the warm-up is still alive.

    PyTorch refuses that where the warm-up ran on the default stream; see `forget_accumulators`. Captures on a stream
    that the caller names, as those of ``torch.compile``, are left alone. Each call needs one of `release`.
    """
    global _original
    with _lock:
        CONTEXT.users["torch_graph_patch"] += 1
        if CONTEXT.users["torch_graph_patch"] > 1:
            return
        original = _original = torch.cuda.graph.__enter__

        @functools.wraps(original)
        def enter(self: Any) -> Any:
            if self.capture_stream is type(self).default_capture_stream:
                forget_accumulators(leaves_on(self.capture_stream.device))
            return original(self)

        torch.cuda.graph.__enter__ = enter


def release() -> None:
    """Undo one `require`; after the last, ``torch.cuda.graph`` is as it was, unless others have changed it too."""
    global _original
    with _lock:
        CONTEXT.users["torch_graph_patch"] -= 1
        if CONTEXT.users["torch_graph_patch"] == 0:
            if getattr(torch.cuda.graph.__enter__, "__wrapped__", None) is _original:
                torch.cuda.graph.__enter__ = _original
            _original = None
