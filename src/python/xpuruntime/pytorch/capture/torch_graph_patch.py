# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Captures by ``torch.cuda.graph`` itself.

What measured times have chosen for eager calls is chosen anew there, by the time on the device. PyTorch refuses to
capture a backward pass while a loss of the warm-up is alive, where that ran on the default stream; see
`forget_accumulators`. In this, captures on a stream that the caller names, as those of ``torch.compile``, are left
alone.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from xpuruntime.pytorch.capture.grad_accumulators import forget_accumulators, leaves_on
from xpuruntime.pytorch.dispatch.context import forget_tuned_routes
from xpuruntime.pytorch.method_patch import MethodPatch

__all__ = ["release", "require"]


def _forgetting(original: Any) -> Any:
    @functools.wraps(original)
    def enter(self: Any) -> Any:
        if self.capture_stream is type(self).default_capture_stream:
            forget_accumulators(leaves_on(self.capture_stream.device))
        forget_tuned_routes()
        return original(self)

    return enter


_PATCH = MethodPatch("torch_graph_patch", torch.cuda.graph, "__enter__", _forgetting)
require = _PATCH.require
release = _PATCH.release
