# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Op cases: the one list that every kernel has to pass."""

from __future__ import annotations

import functools

from xpuruntime.testing import (
    op_cases_attention,
    op_cases_conv,
    op_cases_conv_gradients,
    op_cases_matmul,
    op_cases_norm,
)
from xpuruntime.testing.op_case import OpCase

__all__ = ["op_cases"]


@functools.cache
def op_cases(op: str | None = None) -> tuple[OpCase, ...]:
    """Return the cases, in a fixed order."""
    modules = (op_cases_matmul, op_cases_attention, op_cases_norm, op_cases_conv, op_cases_conv_gradients)
    cases = tuple(case for module in modules for case in module.cases())
    return tuple(case for case in cases if op in (None, case.op))
