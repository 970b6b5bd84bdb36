# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Calls of ONNX Runtime's own session on ours: each is refused with what says the same here."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any, NoReturn

from xpuruntime.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["refuse_arguments", "refuse_attribute"]

#: Execution provider to the arguments that ask for the same.
_PROVIDERS = {
    "CPUExecutionProvider": 'device="cpu", engine="onnxruntime"',
    "CUDAExecutionProvider": 'device="cuda:0", engine="onnxruntime"',
    "TensorrtExecutionProvider": 'device="cuda:0", engine="tensorrt"',
    "NvTensorRTRTXExecutionProvider": 'device="cuda:0", engine="tensorrt-rtx"',
    "OpenVINOExecutionProvider": 'device="cpu", engine="openvino"',
    "QNNExecutionProvider": 'device="npu", engine="qnn"',
    "MIGraphXExecutionProvider": 'device="rocm:0", engine="onnxruntime"',
    "CoreMLExecutionProvider": 'device="metal", engine="onnxruntime"',
    "DmlExecutionProvider": 'device="dml:0", engine="onnxruntime"',
}
#: Argument to what says the same.
_ARGUMENTS = {
    "sess_options": "policy={'execution': {'threads': 4, 'provider_options': {'onnxruntime': "
    "{'graph_optimization_level': 'all'}}}}",
    "provider_options": "policy={'execution': {'provider_options': {'onnxruntime': {...}}}}",
    "disabled_optimizers": "policy={'execution': {'provider_options': {'onnxruntime': "
    "{'optimization.disable_specified_optimizers': 'GeluFusionL2'}}}}",
    "enable_fallback": "nothing: no session falls back by itself; policy={'execution': {'fallback': [...]}} does",
}
#: Attribute to what says the same.
_ATTRIBUTES = {
    "get_inputs": "session.inputs, each with name, dtype and shape",
    "get_outputs": "session.outputs, each with name, dtype and shape",
    "get_overridable_initializers": "session.model.overridable_inputs",
    "get_providers": "session.plan.engine and session.plan.device; session.explain() shows what ran",
    "get_provider_options": "session.plan.settings",
    "get_session_options": "session.plan.settings, made from session.policy",
    "get_modelmeta": "session.model, with metadata, producer and opsets",
    "get_profiling_start_time_ns": "xrt.profile(), which records what runs in a block",
    "end_profiling": "xrt.profile(), which records what runs in a block",
    "io_binding": "session.bind(inputs, outputs)",
    "run_with_iobinding": "binding = session.bind(inputs, outputs), then binding.run()",
    "run_with_ort_values": "session.run({name: array}), which takes arrays of any device through DLPack",
    "run_with_ortvaluevector": "session.run({name: array}), which takes arrays of any device through DLPack",
    "set_providers": "xrt.InferenceSession(model, device=...), a new session",
    "disable_fallback": "nothing: no session falls back by itself",
    "enable_fallback": "policy={'execution': {'fallback': [...]}}",
}


def refuse_arguments(given: Mapping[str, Any], second: Any, names: Iterable[str]) -> None:
    """Refuse arguments that a session does not have."""
    if type(second).__name__ == "SessionOptions":
        given = {**given, "sess_options": second}
    if not given:
        return
    theirs = sorted(name for name in given if name in ("path_or_bytes", "providers") or name in _ARGUMENTS)
    if theirs:
        named = ", ".join(f"{name}=" for name in theirs)
        msg = f"{named} of ONNX Runtime's session {'is' if len(theirs) == 1 else 'are'} no argument of this one"
        fixes = ["InferenceSession(model)"] if "path_or_bytes" in theirs else []
        fixes = [_provider(given["providers"])] if "providers" in theirs else fixes
        fixes += [_ARGUMENTS[name] for name in theirs if name in _ARGUMENTS]
        raise InputError(msg, fix="; ".join(fixes))
    name = min(given)
    near = difflib.get_close_matches(name, names, n=1)
    fix = f"{near[0]}=" if near else f"leave it out; there are {', '.join(names)}"
    raise TypeError(f"InferenceSession has no argument {name!r}. Fix: {fix}")


def _provider(providers: Any) -> str:
    """Return the arguments that ask for the first provider of a list."""
    first = providers[0] if isinstance(providers, (list, tuple)) and providers else providers
    name = first[0] if isinstance(first, tuple) and first else first
    known = _PROVIDERS.get(name) if isinstance(name, str) else None
    return f"InferenceSession(model, {known or 'device=..., engine=...'})"


def refuse_attribute(name: str) -> NoReturn:
    """Refuse an attribute that a session does not have. Raises AttributeError."""
    msg = f"InferenceSession has no attribute {name!r}"
    raise AttributeError(f"{msg}. Fix: {_ATTRIBUTES[name]}" if name in _ATTRIBUTES else msg)
