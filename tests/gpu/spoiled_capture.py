# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Captures that another thread spoils, as the only work of a process: ``spoiled_capture.py MODEL``.

The other thread allocates, which ONNX Runtime's captures forbid. The session has to work afterwards.
"""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch  # noqa: F401 - its CUDA libraries are those that ONNX Runtime finds
from cupy.cuda import runtime
from session_work import close, reference

import xpuruntime as xrt

GRAPH = {"execution": {"engine": "onnxruntime", "device": "cuda:0", "precision": "fp32", "cuda_graph": "require"}}
WAIT = 60.0


def main(model: Path) -> None:
    host = np.random.default_rng(6).standard_normal((4, 512)).astype(np.float32)
    want = reference(model, host)
    stop = threading.Event()
    errors: list[xrt.XpuRuntimeError] = []

    def allocate() -> None:
        while not stop.is_set():
            try:
                runtime.free(runtime.malloc(64 << 20))
            except runtime.CUDARuntimeError:  # its turn to be refused
                continue

    with xrt.InferenceSession(model, policy=GRAPH) as session, ThreadPoolExecutor(1) as pool:
        other = pool.submit(allocate)
        try:
            for number in range(640):
                try:
                    session.bind({"x": (number % 32 + 1, 512)}).close()
                except xrt.XpuRuntimeError as error:
                    errors.append(error)
                if errors and number >= 32:
                    break
        finally:
            stop.set()
        other.result(WAIT)
        assert errors, "no capture was spoiled"
        close(session.run({"x": host})["y"], want, rtol=1e-3, atol=1e-4)
        bound = session.bind({"x": (4, 512)})
        assert bound.graph == "captured"
        bound.inputs["x"].copy_(xrt.Tensor.from_numpy(host))
        bound.run()
        close(bound.outputs["y"].to("cpu").numpy(), want, rtol=1e-3, atol=1e-4)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
