# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`MethodPatch`: a method of one of PyTorch's classes, replaced while somebody needs it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from xpuruntime.pytorch.dispatch.context import CONTEXT


class MethodPatch:
    """A replacement of a method, shared by all that need it."""

    def __init__(self, users: str, owner: Any, name: str, replacing: Callable[[Any], Any]) -> None:
        self._users = users
        self._owner = owner
        self._name = name
        self._replacing = replacing
        self._lock = threading.Lock()
        self._original: Any = None
        self._replacement: Any = None

    def require(self) -> None:
        """Replace the method; each call is undone by one `release`."""
        with self._lock:
            CONTEXT.users[self._users] += 1
            if CONTEXT.users[self._users] == 1 and self._owner is not None:
                self._original = getattr(self._owner, self._name)
                self._replacement = self._replacing(self._original)
                setattr(self._owner, self._name, self._replacement)

    def release(self) -> None:
        """Undo one `require`; after the last, the method is as it was, unless others have replaced it too."""
        with self._lock:
            CONTEXT.users[self._users] -= 1
            if CONTEXT.users[self._users] == 0 and self._owner is not None:
                if getattr(self._owner, self._name) is self._replacement:
                    setattr(self._owner, self._name, self._original)
                self._original = self._replacement = None
