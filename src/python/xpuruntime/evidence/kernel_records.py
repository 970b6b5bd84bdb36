# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Kernels in evidence: their names and what these mean, those of a device, and those considered for a call."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

if TYPE_CHECKING:
    from xpuruntime.evidence.records import DeviceKernel, Unit


class NameFacts(NamedTuple):
    """What can be read from a kernel's name; ``None`` where the name does not show it."""

    tensor_cores: bool | None
    precision: str | None


#: Without tensor cores: CUTLASS writes simt, cuBLAS ffma, or the names of BLAS, which begin the name or a word.
_PLAIN = re.compile(
    r"simt|ffma|(?:^|_)(?:volta|maxwell|turing|ampere|hopper)?_?[sd]gemm(?!.*tensorop)|gemv|gemmk1|winograd"
)
_TENSOR = re.compile(
    r"tensor_?op|[hi]mma|gmma|xmma|nvjet|cutlass.*(?:s1688|s16816|h16816|i16832)|(?:s|h)(?:884|1688|16816)"
    r"|mma_sync|flash_fwd|flash_bwd|fmha|sdpa_sm|flash_forward_mma|flash_forward_wgmma|wgmma",
    re.IGNORECASE,
)
#: In this order: the first that a name holds.
_PRECISIONS = (
    (re.compile(r"tf32|cutlass_80_tensorop_s1688gemm", re.IGNORECASE), "tf32"),
    (re.compile(r"e4m3|e5m2|fp8", re.IGNORECASE), "fp8"),
    (re.compile(r"bf16|bfloat16|nvjet(?:_sm\d+)?_tst", re.IGNORECASE), "bf16"),
    (re.compile(r"i8i8|i16832|imma|s8s8|int8", re.IGNORECASE), "int8"),
    (re.compile(r"f16f16|h16816|h1688|h884|hgemm|_f16_|__half|half_t|nvjet(?:_sm\d+)?_hsh", re.IGNORECASE), "fp16"),
    (re.compile(r"dgemm|f64f64|d884", re.IGNORECASE), "fp64"),
    (re.compile(r"sgemm|f32f32", re.IGNORECASE), "fp32"),
)


#: CUTLASS says in an argument of its template what the kernel is.
_CUTLASS = re.compile(r"cutlass::Kernel2?<(cutlass_\w+)")


def parse_kernel_name(name: str) -> NameFacts:
    """Read a kernel's name."""
    tensor = False if _PLAIN.search(name) else True if _TENSOR.search(name) else None
    if tensor is None:
        return NameFacts(None, None)
    precision = next((word for pattern, word in _PRECISIONS if pattern.search(name)), None)
    return NameFacts(tensor, precision)


def short_name(name: str) -> str:
    """Return a kernel's name without return type, arguments of templates and parameters."""
    inner = _CUTLASS.search(name)
    if inner is not None:
        return inner.group(1)
    depth, kept = 0, []
    text = name.replace("(anonymous namespace)::", "")
    for at, letter in enumerate(text):
        if letter == "(" and depth == 0 and at > 0:
            break
        depth -= letter == ">" and depth > 0
        if depth == 0 and letter not in "<>":
            kept.append(letter)
        depth += letter == "<"
    return "".join(kept).strip().rpartition(" ")[2] or name


DecisionSource = Literal["pinned", "rule", "tuned", "first", "fallback"]


class KernelCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel that could have run, and what became of it.

    Attributes
    ----------
    id : str
        ``backend.name``; or a word of the policy that names no kernel here.
    config : str
        What is settled inside of the kernel, such as a library's algorithm; empty: its default choice.
    accepted : bool
        Whether it can serve. One that was not looked at, because another was found first, is not accepted.
    reason : str
        One sentence; empty only for what was chosen.
    measured_us : float or None
        Microseconds of one call, where it was measured.
    """

    id: str
    config: str
    accepted: bool
    reason: str
    measured_us: float | None

    @property
    def kernel(self) -> str:
        """The kernel with its configuration, as a policy takes it."""
        return f"{self.id}@{self.config}" if self.config else self.id


class KernelDecision(msgspec.Struct, frozen=True, kw_only=True):
    """Why calls of one kind, on operands of given types and shapes, ran by the kernel that they did.

    Attributes
    ----------
    op : str
        As policies name it: ``"matmul"``, ``"layer_norm"`` and so on.
    description : str
        One line: operation, operands, device.
    nodes : tuple of str
        The source nodes that called, as units name them; empty where no node is known.
    module : str
        The module that called, where one is known.
    shapes : dict
        Operand to shape; empty where the engine's own kernel serves.
    dtype, device, phase : str
        Empty where they are not known.
    asked : tuple of str
        Kernels that were asked for, in order; ``("auto",)`` where the choice was free.
    asked_by : str
        The policy key: ``"kernels.matmul"``, ``"kernels.rules[0]"``; ``"kernels.auto_strategy"`` where an xpuruntime
        kernel was measured against the engine's; ``"default"`` where none was requested.
    source : {"pinned", "rule", "tuned", "first", "fallback"}
        The kernel that the policy's short form asks for; that of a rule; by times measured now or in the tuning
        cache; the first that can serve; in place of what was asked for and cannot serve.
    chosen : str or None
        What ran: ``backend.name``; of PyTorch's own the word that a policy has for it, ``torch.flash``. ``None`` where
        another kernel of the engine's did.
    config : str
    candidates : tuple of KernelCandidate
    notes : tuple of str
        A replacement and its reason, a measurement that was not possible.
    count : int or None
        Calls in the instrumented pass, all nodes together; ``None`` where they are not counted, since ONNX Runtime's
        own kernel serves.
    """

    op: str
    description: str
    nodes: tuple[str, ...]
    module: str
    shapes: dict[str, tuple[int, ...]]
    dtype: str
    device: str
    phase: str
    asked: tuple[str, ...]
    asked_by: str
    source: DecisionSource
    chosen: str | None
    config: str
    candidates: tuple[KernelCandidate, ...]
    notes: tuple[str, ...]
    count: int | None

    @property
    def kernel(self) -> str | None:
        """The kernel with its configuration, as a policy takes it; ``None`` where the engine's own ran."""
        return f"{self.chosen}@{self.config}" if self.chosen and self.config else self.chosen


def merged(decisions: Iterable[KernelDecision]) -> tuple[KernelDecision, ...]:
    """Return decisions that differ in nothing but their nodes as one, with the calls of all of them."""
    kernel_decisions: dict[bytes, KernelDecision] = {}
    for decision in decisions:
        key = msgspec.json.encode(
            msgspec.structs.replace(decision, nodes=(), count=None if decision.count is None else 0)
        )
        known = kernel_decisions.get(key)
        if known is None:
            kernel_decisions[key] = decision
            continue
        nodes = tuple(dict.fromkeys((*known.nodes, *decision.nodes)))
        count = None if known.count is None or decision.count is None else known.count + decision.count
        kernel_decisions[key] = msgspec.structs.replace(known, nodes=nodes, count=count)
    return tuple(kernel_decisions.values())


class KernelSum(NamedTuple):
    """One kernel in all units."""

    name: str
    short: str
    kind: str
    times: float
    us: float
    share: float
    tensor_cores: bool | None
    precision: str | None
    units: tuple[str, ...]


def summed(units: Iterable[Unit]) -> tuple[KernelSum, ...]:
    """Return what devices ran, the longest first; empty where no profiler of devices watched."""
    held: dict[tuple[str, str], list[tuple[DeviceKernel, str]]] = defaultdict(list)
    for unit in units:
        for kernel in unit.device_kernels:
            held[kernel.kind, kernel.name].append((kernel, unit.id))
    total = sum(kernel.us for ones in held.values() for kernel, _ in ones)
    kernel_sums = []
    for (kind, name), ones in held.items():
        us = sum(kernel.us for kernel, _ in ones)
        first = ones[0][0]
        kernel_sums.append(
            KernelSum(
                name=name,
                short=short_name(name) if kind == "kernel" else name,
                kind=kind,
                times=sum(kernel.count for kernel, _ in ones),
                us=us,
                share=us / total if total else 0.0,
                tensor_cores=first.tensor_cores,
                precision=first.precision,
                units=tuple(dict.fromkeys(unit for _, unit in ones)),
            )
        )
    return tuple(sorted(kernel_sums, key=lambda kernel_sum: (-kernel_sum.us, kernel_sum.name)))


def reported_kernel(unit: Unit) -> str | None:
    """Return which kernel ran: as the engine reports it, else short names of the device's; ``None``: not reported."""
    if unit.kernel is not None:
        return unit.kernel if unit.kernel_source == "reported" else None
    names = dict.fromkeys(short_name(kernel.name) for kernel in unit.device_kernels if kernel.kind == "kernel")
    return ", ".join(names) or None


def tensor_cores_text(tensor_cores: bool | None, precision: str | None) -> str:
    """Return how a kernel multiplies, as its name shows, such as ``"tensor cores, tf32"``; ``"-"``: it does not."""
    if tensor_cores is None:
        return "-"
    return ", ".join(filter(None, ("tensor cores" if tensor_cores else "no tensor cores", precision)))
