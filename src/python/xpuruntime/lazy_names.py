# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Lazy public names: a package loads the module of a name when the name is first used (PEP 562)."""

from __future__ import annotations

import importlib
import sys
import warnings
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

__all__ = ["import_part", "load_name", "refuse_rest"]


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
    ImportError
        See `import_part`.
    """
    present = (deprecated or {}).get(name)
    if present is not None:
        msg = f"{package}.{name} is now {package}.{present}, and will be removed in 0.3"
        warnings.warn(msg, DeprecationWarning, stacklevel=3)
        return getattr(sys.modules[package], present)
    module = modules.get(name)
    if module is None:
        msg = f"module {package!r} has no attribute {name!r}"
        fix = (replaced or {}).get(name)
        raise AttributeError(f"{msg}: {fix}" if fix else msg)
    value = getattr(import_part(f"{package}.{module}"), name)
    setattr(sys.modules[package], name, value)
    return value


def import_part(module: str) -> ModuleType:
    """Import a module of this package.

    Raises
    ------
    ImportError
        Among others: it needs a library whose earlier import in this process was cut off.
    """
    known = len(sys.modules)
    try:
        return importlib.import_module(module)
    except Exception as error:
        refuse_rest(module, known, error)
        raise


def refuse_rest(module: str, known: int, error: Exception) -> None:
    """Raise where a module cannot be imported because of what an interrupted import of a library has left.

    NumPy, PyTorch and others register what they have with their C parts, and can be imported once in a process. Python
    forgets the package whose import was cut off, and not the modules in it that were complete.

    Parameters
    ----------
    module : str
    known : int
        How many modules there were before the attempt.
    error : Exception
        What the attempt raised.
    """
    ran = {str(frame.f_globals.get("__name__")).partition(".")[0] for frame, _ in walk_tb(error.__traceback__)}
    before = list(sys.modules)[:known]
    others = ran - sys.stdlib_module_names - {__name__.partition(".")[0]}
    cut = sorted(one for one in others if _is_cut_off(one, before))
    if not cut:
        return
    raise ImportError(
        f"{module} cannot be imported: an earlier import of {' and '.join(cut)} in this process was cut off, "
        "as by Ctrl-C, and the rest of it cannot be imported a second time. Fix: start a new process; in a notebook, "
        "restart the kernel",
        name=module,
    ) from error


def _is_cut_off(package: str, modules: list[str]) -> bool:
    """Say whether modules, in the order of their imports, have one in a package before the package itself."""
    inner = next((index for index, name in enumerate(modules) if name.startswith(f"{package}.")), None)
    return inner is not None and package not in modules[:inner]
