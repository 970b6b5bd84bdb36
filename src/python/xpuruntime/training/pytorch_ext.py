# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`xpuruntime.training` under the name that the design gives its module."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuruntime import pytorch

if TYPE_CHECKING:
    from xpuruntime.pytorch import *  # noqa: F403 - for type checkers
else:
    from xpuruntime.training import __dir__, __getattr__  # noqa: F401

__all__ = pytorch.__all__  # noqa: PLE0605, RUF100 - the same list
#: So that Python asks for a name of the original design that is spelled otherwise; see `lazy_names`.
__path__: list[str] = []
