# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Test models quantized, read back and run."""

from __future__ import annotations

import numpy as np
import onnx
from exported_models import exported, samples

from xpuruntime.engines.model import inspect_bytes, inspect_model
from xpuruntime.engines.quantization import Calibration, quantize


def calibrated(model, data):
    info = inspect_bytes(model) if isinstance(model, onnx.ModelProto) else inspect_model(model)
    return info, Calibration(data, info)


def made_from(name, style, **options):
    info, calibration = calibrated(exported(name), samples(name, 8))
    return quantize(info, calibration, style, **options)


def graph_of(made):
    return onnx.load_model_from_string(made.data)


def types_of(proto, op, place):
    """Return the types of an input of all nodes of one operator, of initializers."""
    kinds = {tensor.name: tensor.data_type for tensor in proto.graph.initializer}
    return {kinds[node.input[place]] for node in proto.graph.node if node.op_type == op and node.input[place] in kinds}


def run(model, feeds, optimise=True):
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    if not optimise:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model if isinstance(model, bytes) else str(model), options)
    return session.run(None, feeds)


def cosine(a, b):
    a, b = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))
