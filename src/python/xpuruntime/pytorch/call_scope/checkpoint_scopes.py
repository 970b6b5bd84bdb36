# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Checkpoint scopes: the module of a recomputation is the one in whose forward the checkpoint was made.

``torch.utils.checkpoint`` with ``use_reentrant=False`` calls its function again where a backward needs a tensor, in
which no module runs. With ``use_reentrant=True`` that is inside of a node of autograd that was made in the module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from xpuruntime import _core
from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.method_patch import MethodPatch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["release", "require"]


def _following(init: Callable[..., None]) -> Callable[..., None]:
    def follow(frame: Any, *args: Any, **kwargs: Any) -> None:
        init(frame, *args, **kwargs)
        path = None if torch.compiler.is_compiling() else _core.running_module()
        again = getattr(frame, "recompute_fn", None)
        if path is None or again is None:
            return

        def recompute(*inputs: Any, **kwargs: Any) -> Any:
            _core.enter_module(path)
            try:
                return again(*inputs, **kwargs)
            finally:
                _core.leave_module()

        frame.recompute_fn = recompute

    return follow


_PATCH = MethodPatch("checkpoint_scopes", _private_api.checkpoint_frame, "__init__", _following)
require = _PATCH.require
release = _PATCH.release
