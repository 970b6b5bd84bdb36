# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Sessions of ONNX Runtime on its CUDA execution provider, with memory of the device bound to them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort

CUDA = "CUDAExecutionProvider"


#: fp32 as fp32, and no choice by racing, so that the same convolution runs each time.
PROVIDER: Any = ((CUDA, {"use_tf32": "0", "cudnn_conv_algo_search": "HEURISTIC"}),)


GRAPH: Any = ((CUDA, {"use_tf32": "0", "enable_cuda_graph": "1"}),)


def on_device(value: Any) -> Any:
    return ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(value), "cuda", 0)


class Bound:
    """A session with its inputs and outputs on the device, always at the same addresses."""

    def __init__(self, session: Any, inputs: dict[str, Any], outputs: dict[str, tuple[Any, Any]]) -> None:
        self.session, self.binding = session, session.io_binding()
        self.inputs = {name: on_device(value) for name, value in inputs.items()}
        self.outputs = {
            name: ort.OrtValue.ortvalue_from_shape_and_type(shape, dtype, "cuda", 0)
            for name, (shape, dtype) in outputs.items()
        }
        for name, value in self.inputs.items():
            self.binding.bind_ortvalue_input(name, value)
        for name, value in self.outputs.items():
            self.binding.bind_ortvalue_output(name, value)

    def run(self, options: Any = None, **inputs: Any) -> dict[str, Any]:
        for name, value in inputs.items():
            self.inputs[name].update_inplace(np.ascontiguousarray(value))
        self.session.run_with_iobinding(self.binding, options)
        return {name: value.numpy() for name, value in self.outputs.items()}
