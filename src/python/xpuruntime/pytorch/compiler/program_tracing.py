# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Program tracing: whether a graph is traced that the user keeps, as by an export, ``make_fx`` or AOTAutograd."""

from __future__ import annotations

import torch

from xpuruntime.pytorch import _private_api

__all__ = ["is_traced_for_a_program"]

_mode = _private_api.dispatch_mode
_PROXY = _private_api.mode_keys.PROXY
_FAKE = _private_api.mode_keys.FAKE


def is_traced_for_a_program() -> bool:
    """Say whether a graph is traced now that becomes the user's own, and is no code of ``torch.compile``.

    Such a graph has PyTorch's operators, since it is kept, saved and run where no policy holds.
    """
    if _mode(_PROXY) is None and _mode(_FAKE) is None:
        return bool(torch.compiler.is_exporting())
    return bool(torch.compiler.is_exporting()) or _private_api.compile_context.try_get() is None
