# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`ExecutionPolicy`: who runs a model, where, and how."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from xpuruntime.policies.compound_kinds import FrozenDict, InputShapes, Nested, OneOrMore
from xpuruntime.policies.device_spec import (
    DEVICE_PATTERN,
    ENGINE_PATTERN,
    ArtifactPolicy,
    DeviceSpec,
    DeviceText,
    MemoryPolicy,
    ProviderOptions,
    check_device,
    check_engine,
)
from xpuruntime.policies.document import Refused, quote
from xpuruntime.policies.kinds import Choice, FilePath, Flag, Integer, Text
from xpuruntime.policies.value import Accepts, PolicySection, PolicyValue, field

Precision = Literal["fp32", "tf32", "fp16", "bf16", "int8", "model"]
CudaGraph = Literal["off", "prefer", "require"]
Determinism = Literal["none", "run_to_run", "concurrency", "restart", "batch_position", "batch_invariant"]
Layout = Literal["auto", "nchw", "nhwc"]

Storage = Literal["int8", "int4", "fp8", "nvfp4"]
WeightCompute = Literal["float", "int8", "fp8", "fp4"]

#: Storage of weights to the types that products of them can be computed in.
WEIGHT_COMPUTES: dict[Storage, tuple[WeightCompute, ...]] = {
    "int8": ("float", "int8"),
    "int4": ("float", "int8"),
    "fp8": ("float", "fp8"),
    "nvfp4": ("float", "fp4"),
}
#: Grades of determinism, each of which includes those before it.
DETERMINISM_GRADES: tuple[Determinism, ...] = get_args(Determinism)

_OP = "[A-Za-z_][A-Za-z0-9_.]*(:[A-Za-z_][A-Za-z0-9_]*)?"
_CANDIDATE_PATTERN = f"{ENGINE_PATTERN[:-1]}@{DEVICE_PATTERN[1:]}"


class EngineOnDevice(NamedTuple):
    """One entry of ``execution.fallback``, which a policy file has as ``engine@device``."""

    engine: str
    device: str


def _check_candidate(text: str) -> str:
    engine, at, device = text.partition("@")
    if not at and re.fullmatch(DEVICE_PATTERN, text):
        raise Refused(f"{quote(text)} names no engine. Fix: write 'engine@device', such as 'onnxruntime@{text}'")
    if not at:
        raise Refused(f"{quote(text)} names no device. Fix: write 'engine@device', such as 'onnxruntime@cpu'")
    check_engine(engine)
    check_device(device)
    if device == "auto":
        raise Refused(f"{quote(text)} names no certain device. Fix: write 'engine@device', such as 'onnxruntime@cpu'")
    return text


def _check_op(text: str) -> str:
    if not re.fullmatch(_OP, text):
        raise Refused(
            f"{quote(text)} is not an operator type. Fix: write one such as 'Shape' or 'com.microsoft:FusedConv'"
        )
    return text


class WeightsPolicy(PolicyValue, frozen=True, kw_only=True):
    """How linear layers store their weights, and in which type they compute: two claims.

    Attributes
    ----------
    storage : {"int8", "int4", "fp8", "nvfp4"} or None
        Type of the stored values; ``None``: as the model has them.
    compute : {"float", "int8", "fp8", "fp4"} or None
        Type of the operands of the products: ``"float"`` where the weights are converted first. ``None``: any.
    group : int or None
        Values of a row that share one scale; ``None``: any.
    exclude : tuple of str
        Patterns of modules that keep floats, such as ``"lm_head"``.
    """

    storage: Storage | None = field(
        Choice(tuple(WEIGHT_COMPUTES), "Type in which linear layers store their weights.", what="types"), default=None
    )
    compute: WeightCompute | None = field(
        Choice(get_args(WeightCompute), "Type of the operands of their products.", what="types"), default=None
    )
    group: int | None = field(Integer(1, 65536, "Values of a row that share one scale."), default=None)
    exclude: Accepts[tuple[str, ...], str | Sequence[str]] = field(
        OneOrMore(Text(what="a pattern of modules"), "Patterns of modules that keep floats.", empty=True), default=()
    )

    def _check_together(self) -> None:
        if self.storage is None:
            if stated := next((name for name in ("compute", "group", "exclude") if getattr(self, name)), None):
                raise Refused(
                    f"concerns weights whose storage is not stated. Fix: state 'storage: int8', or leave {stated} out"
                )
            return
        possible = WEIGHT_COMPUTES[self.storage]
        if self.compute is not None and self.compute not in possible:
            raise Refused(
                f"{quote(self.compute)} does not go with storage {self.storage}. Fix: state {' or '.join(possible)}",
                "compute",
            )


class ExecutionPolicy(PolicySection, frozen=True, kw_only=True):
    """Who runs a model, where, and how.

    Attributes
    ----------
    engine : tuple of str or "auto"
        Engines in order of preference; the constructor also takes a single name. Only the form of a name is checked
        here: planning knows which engines exist.
    device : str
        ``"auto"``, ``"cpu"``, ``"cuda"``, ``"cuda:0"``, ``"npu"``, ``"gpu"``, ``"rocm:0"``, ``"metal"``, ``"dml"``;
        see `DeviceSpec`.
    precision : {"model", "fp32", "tf32", "fp16", "bf16", "int8"}
        ``model`` keeps the dtypes of the model file.
    fallback : "error" or tuple of str
        What may run instead when engine or device cannot: ``"engine@device"``, in order. ``"error"``: nothing.
    allow_cpu_ops : tuple of str
        Operator types that may run on the CPU although another device is asked, such as ``"Shape"``.
    static_shape : bool
        Whether all input shapes are fixed at load time.
    static_batch : int or None
        Rows of every run of the engine: smaller batches are padded to them, and outputs cut, so that a row gives the
        same bits in a batch of every size. ``None``: batches run as they are.
    shapes : dict of str to tuple of (int or str)
        Input name to its dimensions: each a size, or a range ``"1..512"`` (min..max) or ``"1..128..512"``
        (min..opt..max). Fixed sizes are put into the graph. Frozen, as `provider_options`.
    cuda_graph : {"off", "prefer", "require"}
    memory : MemoryPolicy
    artifacts : ArtifactPolicy
        Where compiled models are kept.
    determinism : {"none", "run_to_run", "concurrency", "restart", "batch_position", "batch_invariant"}
        Each grade includes those before it. ``run_to_run``: the same inputs give the same bits in every run of a
        session. ``concurrency``: also while other runs are in flight. ``restart``: also in another process on the same
        machine. ``batch_position``: a row gives the same bits at every place of a batch, whatever the other rows are.
        ``batch_invariant``: and in a batch of every size. `xpuruntime.determinism` tests them.
    tf32 : bool or None
        Whether fp32 matmul and convolution may use TF32; ``None`` leaves it to `precision` and the engine.
    weights : WeightsPolicy
        Storage and computing type of the weights of linear layers, in PyTorch.
    layout : {"auto", "nchw", "nhwc"}
    threads : int or None
        CPU threads inside one operator, 1 to 4096; ``None`` leaves it to the engine.
    lock : str or None
        Path of a lock file: a session opens only where it fits. In a policy file it is relative to the folder of that
        file; in a value that was made otherwise, to the current folder.
    provider_options : dict of str to dict
        Engine name to option name to text, number or bool: handed to that engine as they are. Frozen; ``dict(...)``
        makes a copy.

    Raises
    ------
    PolicyError
        For an unknown field or a bad value; names the nearest valid one.

    Examples
    --------
    >>> ExecutionPolicy(engine="onnxruntime", device="cuda:0", precision="fp16")
    ExecutionPolicy(engine=('onnxruntime',), device='cuda:0', precision='fp16')
    """

    SECTION = "execution"
    engine: Accepts[tuple[str, ...] | Literal["auto"], str | Sequence[str]] = field(
        OneOrMore(
            Text(what="the name of an engine", parse=check_engine, pattern=ENGINE_PATTERN),
            "Engine, or several in order of preference.",
            word="auto",
        ),
        default="auto",
    )
    device: Accepts[str, str | DeviceSpec] = field(DeviceText("Device to run on."), default="auto")
    precision: Precision = field(
        Choice(
            get_args(Precision),
            "Precision to compute in; 'model' keeps the dtypes of the model file.",
            what="precisions",
        ),
        default="model",
    )
    fallback: Accepts[tuple[str, ...] | Literal["error"], str | Sequence[str]] = field(
        OneOrMore(
            Text(what="an 'engine@device'", parse=_check_candidate, pattern=_CANDIDATE_PATTERN),
            "What may run instead, in order; 'error' for nothing.",
            word="error",
        ),
        default="error",
    )
    allow_cpu_ops: Accepts[tuple[str, ...], str | Sequence[str]] = field(
        OneOrMore(
            Text(what="an operator type", parse=_check_op, pattern=f"^{_OP}$"),
            "Operator types that may run on the CPU although another device is requested.",
            empty=True,
        ),
        default=(),
    )
    static_shape: bool = field(Flag("Whether all input shapes are fixed at load time."), default=False)
    static_batch: int | None = field(
        Integer(1, 65536, "Rows of every run: smaller batches are padded to them."), default=None
    )
    shapes: Accepts[dict[str, tuple[int | str, ...]], Mapping[str, Sequence[int | str]]] = field(
        InputShapes("Dimensions of the inputs, each a size or a range: input to list."), default=FrozenDict()
    )
    cuda_graph: CudaGraph = field(
        Choice(get_args(CudaGraph), "Whether to run as one captured CUDA graph."), default="off"
    )
    memory: Accepts[MemoryPolicy, MemoryPolicy | dict[str, Any]] = field(
        Nested(MemoryPolicy, "Which pool serves device memory, and how much of it."), default=MemoryPolicy()
    )
    artifacts: Accepts[ArtifactPolicy, ArtifactPolicy | dict[str, Any]] = field(
        Nested(ArtifactPolicy, "Where compiled models are kept, and what happens to one that does not fit."),
        default=ArtifactPolicy(),
    )
    determinism: Determinism = field(
        Choice(
            DETERMINISM_GRADES,
            "How far results must repeat bit for bit; each grade includes those before.",
            what="grades",
        ),
        default="none",
    )
    tf32: bool | None = field(Flag("Whether fp32 matmul and convolution may use TF32."), default=None)
    weights: Accepts[WeightsPolicy, WeightsPolicy | dict[str, Any]] = field(
        Nested(WeightsPolicy, "How linear layers of PyTorch store their weights, and in which type they compute."),
        default=WeightsPolicy(),
    )
    layout: Layout = field(Choice(get_args(Layout), "Memory layout of images.", what="layouts"), default="auto")
    threads: int | None = field(Integer(1, 4096, "CPU threads inside one operator."), default=None)
    lock: str | None = field(
        FilePath(
            "File of a lock that a session must fit, relative to the policy file.",
            what="the path of a lock file",
        ),
        default=None,
    )
    provider_options: Accepts[
        dict[str, dict[str, str | int | bool | float]], Mapping[str, Mapping[str, str | int | bool | float]]
    ] = field(
        ProviderOptions("Settings handed to one engine as they are: engine to option to value."), default=FrozenDict()
    )

    @property
    def deterministic(self) -> bool:
        """Whether results must repeat bit for bit, in any grade."""
        return self.determinism != "none"

    @property
    def fallback_candidates(self) -> tuple[EngineOnDevice, ...]:
        """What `fallback` lists, in order; empty for ``"error"``."""
        listed = () if self.fallback == "error" else self.fallback
        return tuple(EngineOnDevice(engine, device) for engine, _, device in (entry.partition("@") for entry in listed))

    def _check_together(self) -> None:
        if self.tf32 is False and self.precision == "tf32":
            raise Refused(
                "false contradicts precision 'tf32'. Fix: leave 'tf32' out, or state precision 'fp32'", "tf32"
            )
        if self.tf32 is True and self.precision == "fp32":
            raise Refused("true contradicts precision 'fp32'. Fix: leave 'tf32' out, or state precision 'tf32'", "tf32")
        ranges = [name for name, shape in self.shapes.items() if any(isinstance(size, str) for size in shape)]
        if self.static_shape and ranges:
            raise Refused(
                f"true contradicts the range in shapes.{ranges[0]}. Fix: state one size for each dimension, or leave "
                "'static_shape' out",
                "static_shape",
            )
