# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Inputs whose values OpenVINO computes otherwise than ONNX: sessions look at them, since no plan knows values."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from xpuruntime.engines.known_errors import applies_to, inputs_with_errors, known_errors
from xpuruntime.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xpuruntime.engines.model import ModelInfo

__all__ = ["InputValues"]

#: OpenVINO computes these in 32 bits and wraps what does not fit, so what does not fit is refused.
_WIDE = ("int64", "uint64", "uint32")
_LEAST, _MOST = -(2**31), 2**31 - 1
_FLOATS = ("float32", "float64", "float16", "bfloat16")
#: Elements of which a sum of squares is quicker than a search.
_FEW = 8192
_FIX = "take another engine for such values (execution: {engine: onnxruntime, device: cpu})"


class InputValues:
    """Refuses values of a model's inputs that OpenVINO is known to compute wrongly."""

    def __init__(self, info: ModelInfo, device: str) -> None:
        self._wide = tuple(value.name for value in info.inputs if value.dtype in _WIDE)
        reached = functools.partial(_reached, info, device)
        floats = {value.name for value in info.inputs if value.dtype in _FLOATS}
        self._nodes = {name: node for name, node in reached("nan").items() if name in floats}
        self._empty = reached("empty")

    def check(self, arrays: Mapping[str, Any]) -> None:
        """Refuse integers that would wrap, and NaN of which a node makes a number."""
        for name in self._wide:
            _check_range(name, _numpy(arrays[name]))
        for name, node in self._nodes.items():
            if _has_nan(_numpy(arrays[name])):
                msg = f"input {name!r} holds NaN, of which OpenVINO makes a number in {node}, where ONNX keeps it"
                raise InputError(msg, fix=f"{_FIX}, or replace NaN in {name!r}", engine="openvino")

    def check_sizes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse inputs without elements, over which a node reads memory that nobody wrote, or ends the process."""
        for name, node in self._empty.items():
            if 0 in shapes[name]:
                msg = (
                    f"input {name!r} has no elements (shape {list(shapes[name])}), and over nothing OpenVINO returns "
                    f"wrong numbers from {node}, or ends the process"
                )
                raise InputError(msg, fix=f"{_FIX}, or do not run for an empty {name!r}", engine="openvino")


def _reached(info: ModelInfo, device: str, values: str) -> dict[str, str]:
    import openvino

    rows = (row for row in known_errors("openvino") if row.values == values)
    reached = dict[str, str]()
    for row in rows:
        if applies_to(row, openvino.__version__, device):
            reached |= inputs_with_errors(info, row)
    return reached


def _numpy(array: Any) -> Any:
    return array if isinstance(array, np.ndarray) else array.numpy()  # a Tensor


def _has_nan(array: Any) -> bool:
    if array.size <= _FEW and array.dtype in (np.float32, np.float64):
        flat = array.ravel()
        return bool(np.isnan(flat.dot(flat)))  # squares are not negative: their sum is NaN where one of them is
    if array.dtype == np.float16 or array.dtype.kind not in "f":
        return bool(np.isnan(array).any())
    return bool(array.size) and bool(np.isnan(array.min()))


def _check_range(name: str, array: np.ndarray[Any, Any]) -> None:
    if array.size and (array.max() > _MOST or array.min() < _LEAST):
        msg = (
            f"input {name!r} holds integers outside {_LEAST}..{_MOST}, and OpenVINO computes {array.dtype.name} in 32 "
            "bits. Fix: use the engine onnxruntime for such values"
        )
        raise InputError(msg)
