# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The training API under the name of its layer: every name of `xpuruntime.pytorch`, and nothing else.

Requires PyTorch, as `xpuruntime.pytorch` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xpuruntime import pytorch
from xpuruntime.lazy_names import import_part as _import_part

if TYPE_CHECKING:
    from xpuruntime.pytorch import *  # noqa: F403 - for type checkers
    from xpuruntime.training import pytorch_ext as pytorch_ext

__all__ = pytorch.__all__  # noqa: PLE0605, RUF100 - the same list

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name.startswith("__"):  # of a module, such as __path__, not of the API
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name == "pytorch_ext":
            return _import_part(f"{__name__}.{name}")
        return getattr(pytorch, name)


def __dir__() -> list[str]:
    return dir(pytorch)
