# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`check_number`: an argument of a fused operation that is a number, also where `torch.compile` traces the call."""

from __future__ import annotations

import numbers
from typing import Any

import torch

from xpuruntime.errors import InputError

__all__ = ["check_number"]

_NUMBERS = (numbers.Real, torch.SymInt, torch.SymFloat)


def check_number(name: str, value: Any, *, optional: bool = False) -> None:
    """Raise InputError for an argument that is no number."""
    if not (value is None and optional) and not isinstance(value, _NUMBERS):
        raise InputError(f"{name} is {type(value).__name__}; expected a number")
