# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Functions of `SessionWorker` in its process: they open sessions and run them. Arrays go as text."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["compile_session", "decoded", "drop_session", "encoded", "open_session", "run_session"]

_open: dict[int, Any] = {}


def open_session(number: int, path: str | None, text: str | None, opening: dict[str, Any]) -> dict[str, Any]:
    """Open a session on a file, or on its bytes as text; return its `outputs`, and where its nodes are `placed`."""
    from xpuruntime.engines.qnn.opening import Opening, construct, placements

    session = _open[number] = construct(path or base64.b64decode(text or ""), msgspec.convert(opening, Opening))
    return {
        "outputs": [output.name for output in session.get_outputs()],
        "placed": [msgspec.to_builtins(placement) for placement in placements(session)],
    }


def run_session(number: int, feeds: dict[str, Any]) -> dict[str, Any]:
    """Run on encoded arrays, and return the results encoded."""
    from xpuruntime.engines.onnxruntime._private_api import raw_session

    session = _open[number]
    names = [output.name for output in session.get_outputs()]
    return encoded(dict(zip(names, raw_session(session).run(names, decoded(feeds), None), strict=True)))


def drop_session(number: int) -> None:
    """Let go of a session."""
    _open.pop(number, None)


def compile_session(path: str | None, text: str | None, opening: dict[str, Any], out: str) -> None:
    """Compile a file, or its bytes as text, into the file `out`."""
    from xpuruntime.engines.qnn.opening import Opening, compile_file

    compile_file(path or base64.b64decode(text or ""), msgspec.convert(opening, Opening), out)


def encoded(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dtypes, shapes and bytes of arrays, as JSON has them."""
    return {
        name: [array.dtype.str, array.shape, base64.b64encode(array.tobytes()).decode()]
        for name, array in arrays.items()
    }


def decoded(arrays: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Return arrays that may be written."""
    return {
        name: np.frombuffer(bytearray(base64.b64decode(text)), dtype).reshape(shape)
        for name, (dtype, shape, text) in arrays.items()
    }
