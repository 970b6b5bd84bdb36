# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""bfloat16 inputs and outputs: OpenVINO has the type, NumPy does not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from xpuruntime.engines.openvino.slots import infer_call, share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xpuruntime import _core
    from xpuruntime.engines.model import TensorInfo

__all__ = ["borders", "run_tensors"]


def borders(tensor: _core.Tensor) -> tuple[np.ndarray[Any, Any], Any]:
    """Return the memory of a contiguous tensor as an array that OpenVINO takes, and its type where NumPy has none."""
    import openvino as ov

    array = tensor.numpy()
    return (array.view(np.uint16), ov.Type.bf16) if tensor.dtype == "bfloat16" else (array, None)


def run_tensors(compiled: Any, tensors: Sequence[_core.Tensor], outputs: Sequence[TensorInfo]) -> list[_core.Tensor]:
    """Run once, on a request of its own, and return outputs in memory of their own."""
    import ml_dtypes

    from xpuruntime import _core

    request = compiled.create_infer_request()
    kept = [borders(tensor) for tensor in tensors]
    for index, (array, kind) in enumerate(kept):
        request.set_input_tensor(index, share(array, kind))
    infer_call(request)({}, True, False)
    results = []
    for index, info in enumerate(outputs):
        array = np.array(request.get_output_tensor(index).data)
        if info.dtype == "bfloat16":  # OpenVINO shows it as another type of two bytes
            array = array.view(np.uint16).view(ml_dtypes.bfloat16)
        results.append(_core.Tensor.from_numpy(array))
    return results
