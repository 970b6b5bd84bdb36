# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Names, types, options and failures of PyTorch in the terms of policies and reports."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from xpuruntime.engines.arrays import torch_dtype_name
from xpuruntime.engines.base import EngineSettings
from xpuruntime.engines.control_builder import BOOL, Option
from xpuruntime.errors import (
    CudaError,
    EngineFailed,
    InputError,
    OutOfMemoryError,
    UnsupportedOperationError,
    XpuRuntimeError,
)
from xpuruntime.runtime.snapshot import core_problem

if TYPE_CHECKING:
    from xpuruntime.runtime.doctor.facts import TorchFacts

#: Recurrent layers of a program. PyTorch runs some by one kernel, and others product by product.
RECURRENT = frozenset(("lstm", "gru", "rnn_tanh", "rnn_relu"))
#: These kernels, where a program names them itself.
RECURRENT_KERNELS = frozenset(("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn"))
#: One step of such layers, which runs product by product.
CELLS = frozenset(("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"))

_TYPES = {"float8e4m3fn": "float8_e4m3fn", "float8e5m2": "float8_e5m2"}


def torch_dtype(name: str) -> Any:
    """Return the ``torch.dtype`` of xpuruntime's name of a type."""
    import torch

    return getattr(torch, _TYPES.get(name, name))


def torch_precision(dtype: Any) -> str:
    """Return ``"fp16"`` for ``torch.float16``; integer types keep their names."""
    from xpuruntime.engines.precision.types import precision_name

    return precision_name(torch_dtype_name(dtype))


def precision_dtype(name: str) -> Any:
    """Return ``torch.float16`` for ``"fp16"``; ``torch.float32`` for what is no type of its own, such as ``"tf32"``."""
    import torch

    kinds = {"fp64": torch.float64, "fp16": torch.float16, "bf16": torch.bfloat16}
    return kinds.get(name, torch.float32)


def op_name(target: Any) -> str:
    """Return ``"aten.addmm"`` for the overload ``aten.addmm.default``."""
    text = str(target)
    if hasattr(target, "overloadpacket"):
        text = str(target.overloadpacket)
    elif hasattr(target, "__name__"):
        text = target.__name__
    return text.replace("::", ".")


#: Type, as PyTorch and ``ml_dtypes`` call it, to integers of its size, as both call these.
_BITS = {"bfloat16": "int16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}


def from_numpy(array: Any) -> Any:
    """Return a tensor on the memory of a contiguous array. It is written only if the array may be."""
    import torch

    bits = _BITS.get(array.dtype.name)
    if bits is None:
        return torch.from_dlpack(_writable(array))
    return torch.from_dlpack(_writable(array.view(bits))).view(getattr(torch, array.dtype.name))


def to_numpy(tensor: Any) -> Any:
    """Return an array on the memory of a tensor on the CPU. Raises `InputError` without ``ml_dtypes``."""
    import torch

    name = str(tensor.dtype).removeprefix("torch.")
    bits = _BITS.get(name)
    if bits is None:
        return tensor.numpy()
    try:
        import ml_dtypes
    except ImportError:
        raise InputError(
            f"a result is {name}, which NumPy does not have. Fix: pip install ml_dtypes, or pass torch tensors, and "
            "results are torch tensors"
        ) from None
    return tensor.view(getattr(torch, bits)).numpy().view(getattr(ml_dtypes, name))


class _Shared:
    """Memory of a read-only array, for readers only: torch has no tensors that cannot be written."""

    def __init__(self, array: Any) -> None:
        facts = dict(array.__array_interface__)
        facts["data"] = (facts["data"][0], False)
        self.__array_interface__ = facts
        self.array = array


def _writable(array: Any) -> Any:
    return array if array.flags.writeable else np.asarray(_Shared(array))


#: What a policy may call this engine.
NAMES = ("torch", "pytorch")

OPTIONS: dict[str, Option] = {
    "mode": Option(
        meaning="run operators one by one, or compile the whole",
        values=("eager", "compile"),
        search=("compile",),
        search_first=True,
    ),
    "compile_mode": Option(
        meaning="the mode of torch.compile",
        values=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
        search=("reduce-overhead", "max-autotune"),
        needs={"mode": ("compile",)},
    ),
    "fullgraph": Option(meaning="refuse what torch.compile cannot take as one graph", values=BOOL),
    "dynamic": Option(meaning="compile once for all sizes", values=BOOL),
    "max_length": Option(meaning="most tokens of a text in a cache of captured decode steps", low=1, high=2**31 - 1),
}


class TorchSettings(EngineSettings, frozen=True, kw_only=True):
    """What `load` hands to PyTorch."""

    mode: Literal["eager", "compile"] = "eager"
    compile: Mapping[str, str] = {}
    convert: Literal["fp16", "bf16"] | None = None
    tf32: bool | None = None
    deterministic: bool = False
    threads: int | None = None
    graph: Literal["off", "prefer", "require"] = "off"
    strict: bool = False

    @property
    def compile_options(self) -> dict[str, Any]:
        """Arguments of `torch.compile`."""
        options: dict[str, Any] = {"fullgraph": self.compile.get("fullgraph") == "1"}
        if "compile_mode" in self.compile:
            options["mode"] = self.compile["compile_mode"]
        if "dynamic" in self.compile:
            options["dynamic"] = self.compile["dynamic"] == "1"
        return options


class DecoderSettings(TorchSettings, frozen=True, kw_only=True):
    """What a decoder of transformers is loaded with."""

    dtype: str | None = None
    max_length: int = 0
    transformers: str = ""


def translate(error: Exception, *, doing: str, device: str) -> XpuRuntimeError:
    """Return `error` as an xpuruntime error, saying what was being done."""
    if isinstance(error, XpuRuntimeError):
        return error
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{doing} on {device}: {' '.join(lines[:2]) or type(error).__name__}"
    name = type(error).__name__
    if name == "OutOfMemoryError" or isinstance(error, MemoryError):
        return OutOfMemoryError(f"{text}. Use a smaller batch", engine="torch", device=device)
    if name in ("AcceleratorError", "CudaError") or "CUDA error" in text:
        return CudaError(text, engine="torch", device=device)
    if "deterministic" in text:
        return UnsupportedOperationError(
            f"{text}. Leave execution.determinism out, or use an operator that has a deterministic form",
            engine="torch",
            device=device,
        )
    return EngineFailed(text, engine="torch", device=device)


#: Operators of namespaces other than these multiply in the types of their tensors.
_PRODUCTS = ("linear", "conv", "matmul", "mul", "add", "batch_norm", "lstm", "gru", "rnn")
#: Products of int8 tensors.
_ATEN = frozenset(("_int_mm", "_int_bmm", "qlinear_pointwise", "qconv_pointwise", "qconv2d_pointwise"))
#: They hold weights of fewer bits and multiply in floats.
_DEQUANTIZED = ("_fp16", "_prepack", "_unpack", "embedding_bag")


def multiplies_integers(op: str) -> bool:
    """Whether an operator, such as ``"aten._int_mm"`` or ``"quantized.linear_dynamic"``, multiplies integers."""
    space, _, name = op.replace("::", ".").partition(".")
    name = name.partition(".")[0]
    if name in _ATEN or name.startswith("_dyn_quant_matmul"):
        return True
    if space not in ("quantized", "onednn", "sparse"):
        return False
    return any(word in name for word in _PRODUCTS) and not any(word in name for word in _DEQUANTIZED)


def torch_facts() -> TorchFacts | None:
    """Return the route, where PyTorch is installed and can be imported; that takes seconds."""
    if core_problem() is not None or find_spec("torch") is None:
        return None
    try:
        from xpuruntime.pytorch.dispatch.fast_path import facts

        return facts()
    except (ImportError, OSError):  # which the checks of engines say
        return None
