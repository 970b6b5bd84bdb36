# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Inputs and outputs of a model, passed between two processes: JSON, and a file for each array."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from xpuruntime.locks.worker_side.xrt_session_worker import read_array, write_array

__all__ = ["read_value", "write_value"]


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
        if any(type(one) is not str for one in texts):
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
    found = read_array(path)[1]
    path.unlink()
    path.with_suffix(".json").unlink()
    return found


def _key(key: Any) -> str | int:
    if isinstance(key, (str, int)):
        return key
    msg = f"a mapping with a key of type {type(key).__name__} cannot be passed; keys are text or whole numbers"
    raise TypeError(msg)
