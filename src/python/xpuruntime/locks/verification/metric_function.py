# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A metric in its worker process, and the inputs and outputs that pass between the two processes."""

from __future__ import annotations

import builtins
import errno
import importlib.util
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xpuruntime import errors
from xpuruntime.locks.worker_side.xrt_session_worker import read_array, write_array

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["compute", "is_full_disk", "load", "number_of", "read_value", "said", "write_value"]


def write_value(value: Any, folder: Path) -> dict[str, Any]:
    """Return a value as JSON can carry it, with arrays as files of a folder."""
    if value is None or type(value) in (bool, int, float, str):
        return {"plain": value}
    if isinstance(value, Mapping):
        return {"map": [[_key(key), write_value(one, folder)] for key, one in value.items()]}
    if isinstance(value, (list, tuple)):
        return {"list": [write_value(one, folder) for one in value]}
    array = np.asarray(value)
    if array.dtype == object:
        texts = array.ravel().tolist()
        if any(type(text) is not str for text in texts):
            msg = f"a value of type {type(value).__name__} cannot be passed; pass arrays of numbers or of text"
            raise TypeError(msg)
        return {"texts": texts, "shape": array.shape}
    path = folder / f"{secrets.token_hex(8)}.npy"
    write_array(path, array, "")
    return {"array": str(path)}


def read_value(passed: dict[str, Any]) -> Any:
    """Return what `write_value` wrote, and remove its files."""
    [(kind, content)] = ((kind, content) for kind, content in passed.items() if kind != "shape")
    if kind == "plain":
        return content
    if kind == "map":
        return {key: read_value(one) for key, one in content}
    if kind == "list":
        return [read_value(one) for one in content]
    if kind == "texts":
        array = np.empty(len(content), object)
        array[:] = content
        return array.reshape(passed["shape"])
    path = Path(content)
    value = read_array(path)[1]
    path.unlink()
    path.with_suffix(".json").unlink()
    return value


def _key(key: Any) -> str | int:
    if isinstance(key, (str, int)):
        return key
    msg = f"a mapping with a key of type {type(key).__name__} cannot be passed; keys are text or whole numbers"
    raise TypeError(msg)


_MODULE = "xrt_metric"

_function: Callable[[Callable[[Any], Any]], Any]


def load(file: str, name: str, path: list[str]) -> dict[str, str]:
    """Import a file, with the module path of the verifying process. Return what it raised or lacks, if anything."""
    global _function
    sys.path[:] = path
    spec = importlib.util.spec_from_file_location(_MODULE, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module
    try:
        spec.loader.exec_module(module)
        function = getattr(module, name, None)
    except BaseException as error:
        return {"raised": said(error)}
    if not callable(function):
        return {"lacks": name}
    _function = function
    return {}


def compute(folder: str, ask: Callable[[Any], Any]) -> dict[str, Any]:
    """Call the function. Return its number and the type that it returned, or what it raised."""

    def run(inputs: Any) -> Any:
        reply = ask(write_value(inputs, Path(folder)))
        if "raised" in reply:
            raise _error(*reply["raised"])
        return read_value(reply)

    try:
        value = _function(run)
    except BaseException as error:
        return {"full" if is_full_disk(error) else "raised": said(error)}
    return {"number": number_of(value), "type": type(value).__name__}


def is_full_disk(error: BaseException | None) -> bool:
    """Whether an exception, or one that it was raised from or after, is of a disk or a quota that is full."""
    for _ in range(100):
        if error is None or (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)):
            return error is not None
        error = error.__cause__ or error.__context__
    return False


def number_of(value: Any) -> float | None:
    """Return a number, or an array of one, as a float; ``None`` for what is none: text is not read."""
    try:
        return None if isinstance(value, (str, bytes)) else float(value)
    except Exception:  # of any class that a value has of its own
        return None


def said(error: BaseException) -> str:
    """Return the class and the text of an exception in one line."""
    try:
        text = " ".join(str(error).split())[:500]
    except Exception:  # of a class of the user's own
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _error(kind: str, text: str, number: int | None) -> Exception:
    """Return what a run raised in the other process; of a class that is not known here, a `RuntimeError`."""
    if number is not None:
        return OSError(number, text)
    found = getattr(errors, kind, None) or getattr(builtins, kind, None)
    if isinstance(found, type) and issubclass(found, Exception):
        try:
            return found(text)
        except TypeError:  # its arguments are others
            pass
    return RuntimeError(f"{kind}: {text}")
