# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`WhenImported`: an import hook that runs once a module of PyTorch is imported."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import Any


class WhenImported:
    """Calls something with a module once it is imported, since importing it takes seconds; until `remove`."""

    def __init__(self, name: str, then: Callable[[Any], None]) -> None:
        self._name = name
        self._then: Callable[[Any], None] | None = then
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Find a module, as the import system asks."""
        del path, target
        if name != self._name:
            return None
        self._step_aside()
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_notify(module: Any) -> None:
                load(module)
                then, self._then = self._then, None
                if then is not None:
                    then(module)

            spec.loader.exec_module = load_and_notify  # type: ignore[method-assign]
        return spec

    def remove(self) -> None:
        """Do nothing when it is imported. Idempotent."""
        self._then = None
        self._step_aside()

    def _step_aside(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
