# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Whether a graph is traced that the user keeps: an export, ``make_fx``, AOTAutograd without ``torch.compile``."""

from __future__ import annotations

import torch
from torch._guards import CompileContext

__all__ = ["is_traced_for_a_program"]

_mode = torch._C._get_dispatch_mode
_PROXY = torch._C._TorchDispatchModeKey.PROXY
_FAKE = torch._C._TorchDispatchModeKey.FAKE


def is_traced_for_a_program() -> bool:
    """Say whether a graph is traced now that becomes the user's own, and is no code of ``torch.compile``.

    Such a graph has PyTorch's operators, since it is kept, saved and run where no policy holds.
    """
    if _mode(_PROXY) is None and _mode(_FAKE) is None:
        return bool(torch.compiler.is_exporting())
    return bool(torch.compiler.is_exporting()) or CompileContext.try_get() is None
