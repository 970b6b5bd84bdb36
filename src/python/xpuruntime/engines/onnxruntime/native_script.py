# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Source text of an exported script of ONNX Runtime, also for inputs and outputs in bfloat16, which NumPy lacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xpuruntime.engines.native_export.native_config import script_main

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["script_text"]


def script_text(taken: Sequence[str], given: Sequence[str], **facts: Any) -> str:
    """Return the script."""
    facts["main"] = script_main("open_session")
    inter = facts.pop("inter")
    facts["inter"] = "" if inter is None else _PARALLEL.format(inter)
    if not taken and not given:
        return _TEMPLATE.format(imports="", names="", run=_RUN, **facts)
    names = f"BFLOAT16_INPUTS = {list(taken)!r}  # as bits, in arrays of uint16\nBFLOAT16_OUTPUTS = {list(given)!r}\n"
    names += "BFLOAT16 = 16  # of the element types of ONNX\n"
    return _TEMPLATE.format(imports="import ctypes\nimport math\n", names=names, run=_RUN_BITS, **facts)


_PARALLEL = """\
    options.inter_op_num_threads = {}
    options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
"""
_TEMPLATE = '''\
#!/usr/bin/env python3
"""The model {name} on ONNX Runtime {version}, as the lock {digest} has it.

`open_session` gives the session, `run` runs it. As a program: session.py INPUTS.npz OUTPUTS.npz
"""

{imports}import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort

MODEL = Path(__file__).resolve().parent / "model.onnx"
VERSION = {version!r}
PROVIDER = {provider!r}
PROVIDER_OPTIONS = {options}
SESSION_ENTRIES = {entries}
{names}

def session_options():
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.{level}
    options.intra_op_num_threads = {threads}  # 0: ONNX Runtime's choice
{inter}    options.use_deterministic_compute = {deterministic}
    for key, value in SESSION_ENTRIES.items():
        options.add_session_config_entry(key, value)
    return options


def open_session(options=None):
    if ort.__version__ != VERSION:
        raise RuntimeError(f"locked with ONNX Runtime {{VERSION}}, and {{ort.__version__}} is installed")
{preload}    session = ort.InferenceSession(
        str(MODEL),
        session_options() if options is None else options,
        providers=[(PROVIDER, PROVIDER_OPTIONS)],
        enable_fallback=0,
        read_config_from_model=0,
    )
    if session.get_providers()[0] != PROVIDER:
        raise RuntimeError(f"{{PROVIDER}} was asked for, and the session has {{session.get_providers()}}")
    return session


{run}


{main}'''

_RUN = """\
def run(session, inputs):
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs)))"""

_RUN_BITS = """\
def value_of(name, array):
    if name not in BFLOAT16_INPUTS:
        return ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))
    bits = np.ascontiguousarray(array)
    if bits.dtype.itemsize != 2 or bits.dtype.kind not in "uV":
        raise TypeError(f"{name} is bfloat16, and taken as its bits in an array of uint16, not as {bits.dtype}")
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits.view(np.uint16), BFLOAT16)


def array_of(name, value):
    if name not in BFLOAT16_OUTPUTS:
        return value.numpy()
    shape = value.shape()
    bits = ctypes.string_at(value.data_ptr(), 2 * math.prod(shape))
    return np.frombuffer(bits, np.uint16).reshape(shape)


def run(session, inputs):
    names = [output.name for output in session.get_outputs()]
    values = session.run_with_ort_values(names, {name: value_of(name, array) for name, array in inputs.items()})
    return {name: array_of(name, value) for name, value in zip(names, values)}"""
