# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The model on plain ONNX Runtime, with one thread, for the servers of others."""

import numpy as np
import onnxruntime

WIDTH = 64


class Model:
    """Runs arrays of rows."""

    def __init__(self, path: str) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return self._session.run(None, {"x": x})[0]

    def raw(self, body: bytes) -> bytes:
        """Run rows as bytes."""
        return self(np.frombuffer(body, np.float32).reshape(-1, WIDTH)).tobytes()
