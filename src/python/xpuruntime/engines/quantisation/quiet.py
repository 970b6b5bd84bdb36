# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`quiet`: keeps what a quantizer prints about itself out of the caller's log, warnings and stderr."""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["quiet"]

#: `warnings` and the severity of ONNX Runtime's log belong to the whole process.
_LOCK = threading.RLock()
_WARNING, _FATAL = 2, 4


class _Mine(logging.Filter):
    """Drops records of one thread that come from ONNX Runtime's package."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        foreign = "onnxruntime" in record.pathname and "xpuruntime" not in record.pathname.rpartition("onnxruntime")[2]
        return not (record.thread == self._thread and foreign)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence ONNX Runtime's quantizer in this thread. It logs through the root logger, which is left as it was."""
    import onnxruntime as ort

    root, mine, nowhere = logging.getLogger(), _Mine(), logging.NullHandler()
    with _LOCK:
        root.addFilter(mine)
        root.addHandler(nowhere)  # or the first line would install a handler that stays
        ort.set_default_logger_severity(_FATAL)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            ort.set_default_logger_severity(_WARNING)
            root.removeHandler(nowhere)
            root.removeFilter(mine)
