# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""xpuruntime in tools that projects already use. Each module imports its tool, and this package imports none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

__all__ = ["accelerate", "lightning", "ray", "training", "transformers"]


@contextlib.contextmanager
def needs(tool: str, command: str) -> Iterator[None]:
    """Name the install command where importing the tool fails.

    Raises
    ------
    ImportError
        With the reason and the command.
    """
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{tool} cannot be imported: {error}. Fix: `{command}`", name=error.name) from error
