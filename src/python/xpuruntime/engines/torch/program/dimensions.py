# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Names of dynamic dimensions of an exported program, in place of PyTorch's symbols such as ``s77``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from xpuruntime.engines.model.file import refuse
from xpuruntime.evidence.model_metadata.policy import DIMENSIONS_KEY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = ["given_names", "spelled"]


def given_names(metadata: Mapping[str, str], where: str) -> dict[str, str]:
    """Return symbol to name as a file of `xpuruntime.pytorch.export` carries them; nothing for other files."""
    text = metadata.get(DIMENSIONS_KEY)
    if text is None:
        return {}
    try:
        names = json.loads(text)
    except (ValueError, RecursionError):
        names = None
    if not isinstance(names, dict) or not all(isinstance(name, str) and name for name in names.values()):
        reason = f"what it carries under {DIMENSIONS_KEY} is no object of names by symbol"
        raise refuse(where, reason, "export it again with xpuruntime.pytorch.export")
    return names


def spelled(tensors: Iterable[tuple[str, Any]], given: Mapping[str, str]) -> Callable[[Any], str]:
    """Return the function that writes an open size in names instead of symbols.

    A symbol goes by the name it was given, else by the first tensor and axis that it is the size of, as ``"x.0"``, and
    an expression by its symbols: ``"x.0 + 1"``. Where one of these is the size of no tensor, the expression as a whole
    goes by tensor and axis. What is equal has one name everywhere.
    """
    places: dict[str, str] = {}
    for name, value in tensors:
        for axis, size in enumerate(value.shape):
            if not isinstance(size, int):
                places.setdefault(str(size.node.expr), f"{name}.{axis}")
    names = {**places, **given}

    def spell(size: Any) -> str:
        found = size.node.expr
        if not all(str(one) in names for one in found.free_symbols):
            return places[str(found)]
        return str(found.xreplace({one: type(one)(names[str(one)], integer=True) for one in found.free_symbols}))

    return spell
