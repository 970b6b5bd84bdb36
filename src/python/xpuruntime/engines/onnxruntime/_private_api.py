# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Private API of ONNX Runtime: the objects of its C++ module behind its classes in Python.

Nothing else in the package uses them. They cost microseconds less at each run than the classes, take values on the
memory of others, which the classes do not, and tell signatures of operators. `TABLE` says what is done without each.
"""

from __future__ import annotations

from typing import Any

#: Name, why it is used, and what is done without it.
TABLE = (
    (
        "onnxruntime.InferenceSession._sess",
        "whose runs cost some 5 us less, and take values of C++",
        "the session itself runs",
    ),
    ("onnxruntime.IOBinding._iobinding", "which those runs take", "the session itself runs with the binding itself"),
    ("onnxruntime.OrtDevice._get_c_device", "which such a value takes", "the device itself is passed"),
    (
        "onnxruntime.capi.onnxruntime_pybind11_state.OrtValue.from_dlpack",
        "which makes a value on the memory of another library, of any type",
        "the import fails, and the run is refused",
    ),
    (
        "onnxruntime.capi.onnxruntime_pybind11_state.OrtValue.ortvalue_from_numpy_with_onnx_type",
        "which makes a value on memory that is read-only, which DLPack cannot tell ONNX Runtime",
        "the import fails, and the run is refused",
    ),
    (
        "onnxruntime.capi.onnxruntime_pybind11_state.get_all_operator_schema",
        "which gives the signatures of ONNX Runtime's own operators",
        "their types are not known, and a conversion to half precision leaves them in fp32",
    ),
)


def raw_session(session: Any) -> Any:
    """Return what runs a session: with ``run``, ``run_with_ort_values`` and ``run_with_iobinding``."""
    return getattr(session, "_sess", session)


def raw_binding(binding: Any) -> Any:
    """Return what `raw_session` takes as a binding."""
    return getattr(binding, "_iobinding", binding)


def raw_device(device: Any) -> Any:
    """Return what values of `raw_session` take as their device."""
    return getattr(device, "_get_c_device", lambda: device)()


def value_from_dlpack(capsule: Any, is_bool: bool) -> Any:
    """Return a value that `raw_session` takes, on the memory of a DLPack capsule."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    return state.OrtValue.from_dlpack(capsule, is_bool)


def value_from_array(array: Any, onnx_type: int) -> Any:
    """Return a value that `raw_session` takes, on the memory of a NumPy array whose elements are of an ONNX type."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    return state.OrtValue.ortvalue_from_numpy_with_onnx_type(array, onnx_type)


def operator_schemas() -> list[Any]:
    """Return the signatures of all operators of ONNX Runtime; none where it does not tell them."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    tell = getattr(state, "get_all_operator_schema", None)
    return [] if tell is None else list(tell())
