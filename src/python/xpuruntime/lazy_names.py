# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Lazy public names: a package loads the module of a name when the name is first used (PEP 562)."""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["load_name"]


def load_name(
    package: str,
    name: str,
    modules: Mapping[str, str],
    replaced: Mapping[str, str] | None = None,
    deprecated: Mapping[str, str] | None = None,
) -> Any:
    """Return a public name of a package, which has it from then on.

    Parameters
    ----------
    package : str
        ``__name__`` of the package.
    name : str
    modules : mapping of str to str
        Each public name to the module in the package that has it.
    replaced : mapping of str to str, optional
        Names that the package does not have to what to use in their place.
    deprecated : mapping of str to str, optional
        Former names to the names of `modules` that replaced them.

    Warns
    -----
    DeprecationWarning
        The name is a former one.

    Raises
    ------
    AttributeError
        The package has no such name.
    """
    present = (deprecated or {}).get(name)
    if present is not None:
        msg = f"{package}.{name} is now {package}.{present}, and will be removed in the next release"
        warnings.warn(msg, DeprecationWarning, stacklevel=3)
        return getattr(sys.modules[package], present)
    module = modules.get(name)
    if module is None:
        msg = f"module {package!r} has no attribute {name!r}"
        fix = (replaced or {}).get(name)
        raise AttributeError(f"{msg}: {fix}" if fix else msg)
    value = getattr(importlib.import_module(f"{package}.{module}"), name)
    setattr(sys.modules[package], name, value)
    return value
