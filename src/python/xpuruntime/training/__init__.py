# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The training API under the name of its layer: every name of `xpuruntime.pytorch`, and nothing else.

Requires PyTorch, as `xpuruntime.pytorch` does.
"""

from __future__ import annotations

from typing import Any

from xpuruntime import pytorch

__all__ = pytorch.__all__  # noqa: PLE0605, RUF100 - the same list


def __getattr__(name: str) -> Any:
    if name.startswith("__"):  # of a module, such as __path__, not of the API
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(pytorch, name)


def __dir__() -> list[str]:
    return dir(pytorch)
