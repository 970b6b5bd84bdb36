# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Forms`: what was read or written of messages that differ in the values of their tensors alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable

__all__ = ["LONGEST", "Forms"]

#: Bytes of the longest head of a message that is remembered.
LONGEST = 2048
_MOST = 256
_Form = TypeVar("_Form")


class Forms(Generic[_Form]):
    """A bounded table of forms by their key; full, it begins anew. Safe to use from many threads."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Form] = {}
        #: Return the form of a key, or `None`.
        self.get = self._known.get

    def put(self, key: Hashable, form: _Form) -> None:
        """Remember a form."""
        if len(self._known) >= _MOST:
            self._known.clear()
        self._known[key] = form
