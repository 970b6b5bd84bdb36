# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The network that TensorRT builds, and what it says of it."""

from __future__ import annotations

import collections
import itertools
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from xpuruntime.errors import (
    CudaError,
    EngineFailed,
    ModelError,
    OutOfMemoryError,
    UnsupportedOperationError,
    XpuRuntimeError,
)
from xpuruntime.runtime.interruptible_waits import BackgroundCall

if TYPE_CHECKING:
    from xpuruntime.engines.base import Request
    from xpuruntime.engines.model_source import ModelSource
    from xpuruntime.engines.tensorrt.options import TensorRtProduct

#: The vendor's element types to xpuruntime's names.
DTYPES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "INT8": "int8",
    "INT32": "int32",
    "INT64": "int64",
    "BOOL": "bool",
    "UINT8": "uint8",
    "FP8": "float8e4m3fn",
    "INT4": "int4",
    "FP4": "float4e2m1",
    "E8M0": "float8e8m0",
}
_MARK = "[ONNX Layer: "


def strong_typing(trt: Any) -> int:
    """Return the flags of a strongly typed network: none where there is no other kind of network."""
    if not hasattr(trt.BuilderFlag, "FP16"):
        return 0
    return 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)


def parse_network(
    network: Any, parser: Any, source: ModelSource, request: Request, product: TensorRtProduct, heard: Listener
) -> None:
    """Read the model into the network."""
    if isinstance(source.model, bytes):
        # Of the path, the parser uses the folder, in which it looks for external data.
        paths = () if source.folder is None else (str(Path(source.folder) / "model.onnx"),)
        read = parser.parse(source.model, *paths)
    else:
        read = parser.parse_from_file(source.model)
    if not read:
        raise _refused(parser, source, request, product, heard)
    _check_borders(network, request, product)


def _refused(
    parser: Any, source: ModelSource, request: Request, product: TensorRtProduct, heard: Listener
) -> XpuRuntimeError:
    known = {"engine": product.name, "device": request.device}
    if not parser.num_errors:
        return failure(f"reading {source.label} with {product.title}", heard.errors(), **known)
    told = []
    codes = []
    for index in range(parser.num_errors):
        error = parser.get_error(index)
        codes.append(str(error.code()).rpartition(".")[2])
        reason = cleaned(_reason(error.desc()))
        node = f"node {error.node_name()!r} ({error.node_operator()}): " if error.node_operator() else ""
        told.append(f"{node}{reason}")
    message = f"{product.title} cannot read {source.label}: {'; '.join(dict.fromkeys(told))}"
    if "MODEL_DESERIALIZE_FAILED" in codes:
        return ModelError(message, **known, status=codes[0])
    if all(code.startswith(("UNSUPPORTED", "INVALID_NODE", "INVALID_GRAPH")) for code in codes):
        fix = "Change the node in the model, or use engine onnxruntime."
        return UnsupportedOperationError(f"{message}. {fix}", **known, status=codes[0])
    return EngineFailed(message, **known, status=codes[0])


def _reason(text: str) -> str:
    """Return the lines of a parser's message that speak of the node: a machine without a GPU adds one about CUDA."""
    lines = [line.strip() for line in text.splitlines()]
    kept = [line for line in lines if line and "cudaError" not in line and not line.startswith("Invalid Node - ")]
    return ": ".join(kept or lines)


def _check_borders(network: Any, request: Request, product: TensorRtProduct) -> None:
    """Refuse a network whose inputs or outputs are not those of the model: the parser changes some types silently."""
    model = request.model
    known = {"engine": product.name, "device": request.device}
    inputs = {(t := network.get_input(i)).name: t for i in range(network.num_inputs)}
    outputs = {(t := network.get_output(i)).name: t for i in range(network.num_outputs)}
    for role, infos, tensors in (("input", model.inputs, inputs), ("output", model.outputs, outputs)):
        for info in infos:
            tensor = tensors.get(info.name)
            if tensor is None:
                msg = f"{product.title} dropped the {role} {info.name!r} of {model.path}; take it out of the model"
                raise UnsupportedOperationError(msg, **known)
            dtype = DTYPES.get(tensor.dtype.name, tensor.dtype.name)
            if dtype != info.dtype:
                msg = (
                    f"{role} {info.name!r} of {model.path} is {info.dtype}, and {product.title} makes it {dtype}. "
                    "Fix: put "
                    f"a Cast to {dtype} at this {role} into the model"
                )
                raise UnsupportedOperationError(msg, **known)
            if role == "input" and tensor.is_shape_tensor:
                msg = (
                    f"input {info.name!r} of {model.path} holds sizes that other tensors get, and the range of its "
                    "values would have to be known. Fix: make it a constant of the model"
                )
                raise UnsupportedOperationError(msg, **known)


def layer_nodes(text: str | None, nodes: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    r"""Return the source nodes that a layer's metadata names, in order and once each."""
    node_names: list[str] = []
    for part in (text or "").split(_MARK)[1:]:
        name = part
        while name not in nodes and "]" in name:
            name = name[: name.rindex("]")]
        node_names.extend(nodes.get(name, ()))
    return tuple(dict.fromkeys(node_names))


_WARNING = 2
_KEPT = 512
_PLACE = re.compile(r" In \w+ at \S+?:\d+(?=[):\s]|$)|\[[\w.]+::\w+::\d+\] |\[\w+\.(?:cpp|h|hpp):\d+: \w+\] ?")
_HEAD = re.compile(r"^I\w+::\w+: ")
_OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemory|MEM_ALLOC|Requested amount of GPU memory|alloc\w* failed", re.I)
_SCRATCH = re.compile(r"workspace (?:limit|memory)", re.I)
_CUDA = re.compile(r"cudaError|Cuda Runtime|Cuda Driver")
_HINTS = (
    (_SCRATCH, "State a larger execution.memory.limit, or none."),
    (re.compile(r"libnvinfer_lean"), "The option version_compatible needs the lean runtime, which is not installed."),
    (re.compile(r"graph_jit\.cpp"), "This build compiles kernels on a GPU (refit, strip_plan), and there is none."),
    (re.compile(r"\(SM75\)"), "Leave 7.5 out of compute_capability, or state precision fp16."),
    (re.compile(r"[Tt]iming cache (?:miss|entry)"), "Run once with pin_tactics: record."),
)  # fmt: skip

_numbers = itertools.count()
_lines: collections.deque[tuple[int, int, int, str]] = collections.deque(maxlen=_KEPT)
_loggers: dict[str, Any] = {}
_making = threading.Lock()


def logger(trt: Any) -> Any:
    """Return the process's logger of one vendor module.

    The library keeps a pointer to the first logger that it is given, so that one has to live as long as the process.
    """
    with _making:
        cached = _loggers.get(trt.__name__)
        if cached is None:
            cached = _loggers[trt.__name__] = _make_logger(trt)
        return cached


def _make_logger(trt: Any) -> Any:
    base: Any = trt.ILogger

    class Log(base):  # type: ignore[misc]
        def __init__(self) -> None:
            base.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            level = int(severity)
            if level <= _WARNING:
                _lines.append((next(_numbers), threading.get_ident(), level, message))

    return Log()


class Listener:
    """Hears what is logged while the block runs."""

    def __enter__(self) -> Listener:
        self._since = next(_numbers)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def errors(self) -> list[str]:
        """Return the errors so far, once each: those of this thread, or where it has none, those of all."""
        heard = [line for line in list(_lines) if line[0] > self._since and line[2] < _WARNING]
        own = [line for line in heard if line[1] == threading.get_ident()]
        return list(dict.fromkeys(cleaned(line[3]) for line in own or heard))


def cleaned(text: str) -> str:
    """Return a line of the log without places in the vendor's sources and without what repeats the call."""
    return _HEAD.sub("", _PLACE.sub("", text)).strip().rstrip(".").replace(" )", ")")


def failure(doing: str, heard: list[str], *, engine: str, device: str, pool: str | None = None) -> XpuRuntimeError:
    """Return the error of a call that answered with nothing."""
    text = "; ".join(heard) or "it gave no reason"
    hints = [hint for pattern, hint in _HINTS if pattern.search(text)]
    message = " ".join([f"{doing} failed: {text}.", *([f"The pool said: {pool}."] if pool else []), *hints])
    if pool or (_OUT_OF_MEMORY.search(text) and not _SCRATCH.search(text)):
        fix = "Use smaller shapes, a larger execution.memory.limit, or free other sessions."
        return OutOfMemoryError(f"{message} {fix}", engine=engine, device=device)
    kind = CudaError if _CUDA.search(text) else EngineFailed
    return kind(message, engine=engine, device=device)


_Result = TypeVar("_Result")


class Cancel:
    """Whether work in the background is still wanted."""

    def __init__(self) -> None:
        self._asked = False

    def set(self) -> None:
        """Say that it is not."""
        self._asked = True

    @property
    def requested(self) -> bool:
        """Whether somebody said so."""
        return self._asked

    def monitor(self, trt: Any) -> Any:
        """Return a progress monitor that ends a build when it is cancelled."""
        base: Any = trt.IProgressMonitor
        cancel = self

        class Monitor(base):  # type: ignore[misc]
            def __init__(self) -> None:
                base.__init__(self)

            def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
                del phase_name, parent_phase, num_steps

            def phase_finish(self, phase_name: str) -> None:
                del phase_name

            def step_complete(self, phase_name: str, step: int) -> bool:
                del phase_name, step
                return not cancel.requested

        return Monitor()


def interruptible(work: Callable[[], _Result], cancel: Cancel) -> _Result:
    """Return what `work` returns, or raise what it raises.

    An exception that arrives while the caller waits, such as a KeyboardInterrupt, sets `cancel`, waits for the work to
    end, and goes on. A second one does not wait.
    """
    call = BackgroundCall(work, "xpuruntime-tensorrt")
    try:
        return call.result()
    except BaseException:
        cancel.set()
        call.done.wait()
        raise
