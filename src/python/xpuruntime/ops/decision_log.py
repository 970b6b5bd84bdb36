# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What the dispatcher has and decides: the list of kernels, and the log of decisions with their reasons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime import _core
from xpuruntime.argument_types import TEXT, check_types
from xpuruntime.evidence.kernel_records import DecisionSource, KernelCandidate, KernelDecision
from xpuruntime.ops.call_context import prepare
from xpuruntime.ops.plugins import plugin_facts
from xpuruntime.ops.torch_kernels import TorchKernel, missing_distributions, registered_torch_kernels
from xpuruntime.policies.kernel_rules import TENSOR_OPS
from xpuruntime.shown import Shown

if TYPE_CHECKING:
    from rich.console import RenderableType


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """Why one operation, on tensors of given types, shapes and strides, runs by the kernel it does.

    Attributes
    ----------
    op : str
        ``"matmul"``, ``"attention_backward"`` and so on.
    description : str
        One line: operation, shapes, dtype, device.
    shapes : dict
        Operand to shape.
    dtype, device, phase : str
    node, module : str
        Names of the place that called, where it has one.
    asked : tuple of str
        Kernels that were asked for, in order; ``("auto",)`` where the choice was free.
    asked_by : str
        Who asked: ``"kernels.matmul"``, ``"kernels.rules[0]"``, ``"kernel="`` or ``"default"``.
    candidates : tuple of KernelCandidate
        Every kernel that is registered for the operation.
    chosen, config : str
        What runs. ``chosen@config`` as a kernel replays exactly that.
    source : {"pinned", "rule", "tuned", "first", "fallback"}
        By the policy's short form or the call itself; by a rule; by measured times; the first that can serve; in
        place of what was asked for and cannot serve.
    notes : tuple of str
        What one should know besides: a replacement and its reason, a measurement that was not possible.
    count : int
        Calls served so far.
    text : str
        All of it for people, in several lines; also ``str(decision)``.
    """

    op: str
    description: str
    shapes: dict[str, tuple[int, ...]]
    dtype: str
    device: str
    phase: str
    node: str
    module: str
    asked: tuple[str, ...]
    asked_by: str
    candidates: tuple[KernelCandidate, ...]
    chosen: str
    config: str
    source: DecisionSource
    notes: tuple[str, ...]
    count: int
    text: str

    def __str__(self) -> str:
        return self.text

    @property
    def kernel(self) -> str:
        """The kernel with its configuration, as a policy or ``kernel=`` takes it to replay exactly this."""
        return f"{self.chosen}@{self.config}" if self.config else self.chosen

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain


class Decisions(Shown, tuple[Decision, ...]):
    """Decisions, oldest first. ``print`` shows what served and what became of the other kernels; each has all of it.

    Attributes
    ----------
    dropped : int
        Decisions that are not among them, since the log was full.
    """

    dropped = 0

    def __str__(self) -> str:
        from xpuruntime.notebook import plain

        return plain(self.__rich__()).lstrip("\n")

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        from xpuruntime.evidence.render_text.sections import decision_tables

        if not self:
            return Text("no decision: no xpuruntime kernel was called since the start, or since clear_decisions()")
        records = [as_record(decision, (decision.node,) if decision.node else ()) for decision in self]
        title = f"xpuruntime kernels: {len(self)} kinds of calls"
        if self.dropped:
            title += f"; {self.dropped} more came when the log was full and are not listed"
        return Group(*decision_tables(records, title))


def decisions() -> Decisions:
    """Return the distinct decisions of this process, oldest first; a tuple that ``print`` shows as tables.

    At most 10,000 are kept; ``_core`` serves later ones without recording them, and `Decisions.dropped` counts them.
    What is decided in an instrumented pass, that of `InferenceSession.explain`, is in its report and not among them.

    Examples
    --------
    >>> import numpy as np
    >>> import xpuruntime as xrt
    >>> xrt.ops.clear_decisions()
    >>> out = xrt.ops.matmul(np.ones((2, 3)), np.ones((3, 4)), kernel="cpu.reference")
    >>> xrt.decisions()[-1].chosen
    'cpu.reference'
    """
    return recorded(_core.Dispatcher.instance())


def recorded(log: _core.DecisionLog | _core.Dispatcher | _core.CallSite) -> Decisions:
    """Return the decisions of a log, oldest first."""
    logged = Decisions(msgspec.convert(entry, Decision) for entry in log.decisions())
    if isinstance(log, _core.DecisionLog):
        logged.dropped = log.dropped
    elif isinstance(log, _core.Dispatcher):
        logged.dropped = log.dropped_decisions
    return logged


def clear_decisions() -> None:
    """Forget the decisions recorded so far. Choices that were made still hold; they are recorded when made anew."""
    _core.Dispatcher.instance().clear_decisions()


def as_record(decision: Decision, nodes: Sequence[str], *, count: int | None = None) -> KernelDecision:
    """Return a decision as a report holds it."""
    return KernelDecision(
        op=decision.op,
        description=decision.description,
        nodes=tuple(nodes),
        module=decision.module,
        shapes=decision.shapes,
        dtype=decision.dtype,
        device=decision.device,
        phase=decision.phase,
        asked=decision.asked,
        asked_by=decision.asked_by,
        source=decision.source,
        chosen=decision.chosen,
        config=decision.config,
        candidates=decision.candidates,
        notes=decision.notes,
        count=decision.count if count is None else count,
    )


class KernelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel that a policy can ask for.

    Attributes
    ----------
    id : str
        ``backend.name``.
    op : str
        Operation it computes; gradients are operations of their own.
    backend : str
    device_type : str
        ``"cpu"`` or ``"cuda"``.
    description, limits : str
        What it is good for; dtypes, shapes and devices it serves.
    families : tuple of str
        Bare words of a policy that mean it too, besides its backend.
    automatic : bool
        Whether ``"auto"`` may choose it.
    available : bool
        Whether its library can be loaded here, and there is a device of its type.
    reason : str
        Why not, and what to install; empty where it is available.
    version : str
        Of the library and of xpuruntime's code; tuned times hold for one version.
    """

    id: str
    op: str
    backend: str
    device_type: str
    description: str
    limits: str
    families: tuple[str, ...]
    automatic: bool
    available: bool
    reason: str
    version: str

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain


def kernels(op: str | None = None) -> tuple[KernelInfo, ...]:
    """Return the kernels of this process, plugins included, in the order in which ``first_supported`` tries them.

    Opens the libraries of the vendors, to say whether they can be loaded.

    Parameters
    ----------
    op : str, optional
        Only of this operation, such as ``"matmul"`` or ``"attention_backward"``.

    Raises
    ------
    InputError
        For an unknown operation; lists the known ones.
    """
    check_types({"op": TEXT}, {"op": op}, optional=["op"])
    prepare()
    registered = () if op in TENSOR_OPS else _core.KernelRegistry.instance().kernels(op)
    missing = _core.DeviceManager.instance().cuda_reason()
    kernel_infos = [msgspec.convert(facts, KernelInfo) for facts in registered]
    kernel_infos += [
        _of_torch(*torch_kernel) for torch_kernel in registered_torch_kernels() if op in (None, torch_kernel[0].op)
    ]
    return tuple(_on_this_machine(kernel, missing) for kernel in kernel_infos)


def _of_torch(kernel: TorchKernel, device_type: str) -> KernelInfo:
    backend, reason = kernel.id.partition(".")[0], missing_distributions(kernel)
    facts = plugin_facts(backend) or {}
    return KernelInfo(
        id=kernel.id, op=kernel.op, backend=backend, device_type=device_type, description=kernel.description,
        limits=kernel.limits, families=kernel.families, automatic=kernel.automatic in (True, device_type),
        available=not reason, reason=reason, version=facts.get("version", ""),
    )  # fmt: skip


def _on_this_machine(kernel: KernelInfo, missing: str) -> KernelInfo:
    """Return a kernel of CUDA as not available where there is no CUDA device, and why: `missing`."""
    if kernel.device_type != "cuda" or not kernel.available or not missing:
        return kernel
    return msgspec.structs.replace(kernel, available=False, reason=f"there is no CUDA device: {missing}")
