# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Integer inputs that OpenVINO would wrap: it accepts 64-bit types and computes them in 32 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xpuruntime.errors import InputError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["WIDE", "check_range"]

#: OpenVINO computes these in 32 bits and wraps what does not fit, so what does not fit is refused.
WIDE = ("int64", "uint64", "uint32")
_LEAST, _MOST = -(2**31), 2**31 - 1


def check_range(name: str, array: np.ndarray[Any, Any]) -> None:
    """Refuse integers that OpenVINO would wrap."""
    if array.size and (array.max() > _MOST or array.min() < _LEAST):
        msg = (
            f"input {name!r} holds integers outside {_LEAST}..{_MOST}, and OpenVINO computes {array.dtype.name} in 32 "
            "bits; use the engine onnxruntime for such values"
        )
        raise InputError(msg)
