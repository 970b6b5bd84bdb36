# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Recorded calls: what ran by which kernel, in ranges of lengths."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from xpuruntime import _core
from xpuruntime.ops.torch_kernels import compares
from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.attention.call import last_of_range, phase_of
from xpuruntime.pytorch.call_scope import module_paths
from xpuruntime.pytorch.coverage.unserved import products_of_any_type
from xpuruntime.pytorch.dispatch import context
from xpuruntime.pytorch.dispatch.compiled_policy import CompiledPolicy
from xpuruntime.pytorch.dispatch.context import active_policy
from xpuruntime.pytorch.dispatch.route import DEFAULT_ID, NATIVE_NAMES, facts_of_call
from xpuruntime.pytorch.dispatch.tuning import measuring
from xpuruntime.pytorch.explanation.requested import (
    NO_FLOATS,
    RequestedKernels,
    is_no_float,
    request_of,
    requests_other_kernel,
    uncertain,
)
from xpuruntime.pytorch.providers.bound import BoundKernel
from xpuruntime.pytorch.providers.canary import NOT_COMPARED
from xpuruntime.pytorch.providers.process_state import changes_of

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from xpuruntime.pytorch.dispatch.route import Route

Shapes: TypeAlias = "tuple[tuple[int, ...], ...]"

#: Calls of attention by queries, keys and values that are ``[..., length, head_dim]``.
_ATTENTIONS = ("scaled_dot_product_attention", "xpuruntime::attention")
_TRAINING = ("train", "backward")
_MATRIX = 2
#: Kinds of calls that differ in nothing but their sizes; those of further sizes are told apart by range.
_FEW_SIZES = 8


def phase_of_call(op: str, name: str, phase: str, shapes: Shapes) -> str:
    """Return the phase of a recorded call: of an attention, its sizes may say more than what runs around it."""
    lengths = _lengths(op, name, shapes)
    return phase if lengths is None else phase_of(phase, *lengths)


def kv_range(op: str, name: str, phase: str, shapes: Shapes) -> str:
    """Return the range in which the keys and values of an attention lie, such as ``"33..64"``; of others nothing."""
    lengths = _lengths(op, name, shapes)
    if lengths is None or phase in _TRAINING or lengths[1] < 1:
        return ""
    last = last_of_range(lengths[1])
    return f"{last // 2 + 1}..{last}"


def ranged(op: str, name: str, phase: str, shapes: Shapes, *, many: bool = False) -> Shapes:
    """Return shapes in which each length that tells no kinds of calls apart is the last of its range.

    Where there are `many`, no number of rows tells any apart.
    """
    if phase in _TRAINING and not many:
        return shapes
    if _lengths(op, name, shapes) is not None:
        dense = [(*shape[:-2], last_of_range(shape[-2]), shape[-1]) for shape in shapes[:3]]
        return (*dense, *(tuple(map(last_of_range, shape)) for shape in shapes[3:]))  # a mask has both lengths
    if op == "softmax" or (many and op == "conv"):  # of scores, and of images: their last size is a length
        return tuple(tuple(map(last_of_range, shape)) for shape in shapes)
    if op == "matmul" and max(map(len, shapes), default=0) > _MATRIX:
        return tuple((shape[0], *map(last_of_range, shape[1:])) for shape in shapes if shape)
    if phase != "prefill" and not many:
        return shapes
    if op == "matmul":
        rows = next((shape[0] for shape in shapes if len(shape) == _MATRIX), 0)
        return tuple((last_of_range(rows), *shape[1:]) if shape[:1] == (rows,) else shape for shape in shapes)
    return tuple((*map(last_of_range, shape[:-1]), *shape[-1:]) for shape in shapes)


def _lengths(op: str, name: str, shapes: Shapes) -> tuple[int, int] | None:
    if op != "attention" or name not in _ATTENTIONS or len(shapes) < 2 or min(map(len, shapes[:2])) < _MATRIX:
        return None
    return shapes[0][-2], shapes[1][-2]


class MergedSizes:
    """Shapes that tell kinds of calls apart: of each kind the first few as they are, and all others by range."""

    def __init__(self) -> None:
        self._shapes: dict[Any, set[Shapes]] = {}

    def __call__(self, group: Any, op: str, name: str, phase: str, shapes: Shapes) -> Shapes:
        """Return the shapes that identify a call within its group."""
        kinds, seen = ranged(op, name, phase, shapes), self._shapes.setdefault(group, set())
        if kinds not in seen and len(seen) >= _FEW_SIZES:
            return ranged(op, name, phase, shapes, many=True)
        seen.add(kinds)
        return kinds


class RecordedCalls:
    """Calls of one kind."""

    __slots__ = (
        "asked", "by_switch", "count", "device", "dtypes", "first_duration_ns", "first_ns", "kernel", "kv", "measured",
        "module", "name", "native", "number", "op", "phase", "reason", "shapes", "site", "source", "status", "thread",
    )  # fmt: skip

    def __init__(
        self, number: int, name: str, op: str, route: Route | None, module: str, phase: str, tensors: list[torch.Tensor]
    ) -> None:
        self.number = number
        self.name = name
        self.op = op
        self.module = module
        self.phase = phase
        self.shapes = tuple(tuple(t.shape) for t in tensors)
        self.kv = kv_range(op, name, phase, self.shapes)
        self.dtypes = tuple(dict.fromkeys(context.DTYPES.get(t.dtype) or _plain(t.dtype) for t in tensors))
        self.device = _device_of(tensors)
        self.count = 0
        self.first_ns = 0
        self.first_duration_ns = 0
        self.thread = threading.get_native_id()
        self.by_switch = False
        self.native = True
        self.site: _core.CallSite | None = None
        self.asked: tuple[str, ...] = ()
        self.source = "default"
        self.kernel = DEFAULT_ID[op]
        self.status = "default"
        self.reason = ""
        self.measured = () if route is None else route.times
        if products_of_any_type(name) and is_no_float(self.dtypes):
            self.reason = NO_FLOATS
        elif route is not None:
            self.native = route.native
            self.site = None if route.place is None else route.place.site
            self.kernel = route.kernel
            self.status = route.status
            self.reason = route.reasons
            if isinstance(route.place, BoundKernel):
                changes = str(changes_of(route.place.kernel))
                notes = (self.reason, route.place.signature, "" if compares() else NOT_COMPARED, changes)
                self.reason = "; ".join(filter(None, notes))
            if route.source != "default":
                self.asked, self.source = route.asked, route.source
        else:
            self._ask(active_policy())

    def _ask(self, active: CompiledPolicy | None) -> None:
        """Find out what a policy asks for of calls that it does not decide one by one."""
        if active is None:
            return
        if self.op in active.ops:
            facts = facts_of_call(
                self.op,
                device=self.device,
                dtype=self.dtypes[0] if self.dtypes else None,
                phase=self.phase,
                module=self.module,
            )
            wanted, sure = request_of(active.policy.kernels, facts)
            if wanted is not None:
                self.asked, self.source = wanted
                self.status, self.reason = "bypassed", LEFT if sure else f"{LEFT}; {uncertain(self.source)}"
            return
        stated = active.policy.kernels.get(self.op)
        if stated is not None:
            self.by_switch = True
            self.asked = (stated,) if isinstance(stated, str) else tuple(stated)
            self.source = f"kernels.{self.op}"
            self.kernel = NATIVE_NAMES[self.op].get(self.asked[0], DEFAULT_ID[self.op])
            self.status = "honoured"
            libraries = self.op == "matmul" and not self.device.startswith("cuda")
            if libraries and all(requests_other_kernel(self.op, (kernel_name,)) for kernel_name in self.asked):
                self.status, self.by_switch, self.reason = "substituted", False, _ON_CUDA

    @property
    def operator(self) -> str:
        """The operator with its namespace, such as ``"aten::mm.out"``."""
        return self.name if "::" in self.name else f"aten::{self.name}"

    @property
    def label(self) -> str:
        """The calls in a few words, for a trace."""
        return " ".join(filter(None, ("xpuruntime", self.op, self.kernel, self.module)))


_ON_CUDA = "cublas and cublasLt are libraries of CUDA, and do not affect products on the CPU"
#: Why a call that a policy asks something for was not decided.
LEFT = "only PyTorch's own kernel does this, or does it for these arguments"


class _Depth(threading.local):
    value = 0


class CallRecorder:
    """Keeps what is to be known of calls; a `context.CallObserver`."""

    def __init__(self, range_of: Callable[[RecordedCalls], AbstractContextManager[Any]]) -> None:
        self._range_of = range_of
        self._lock = threading.Lock()
        self._seen: dict[Any, RecordedCalls] = {}
        self._sizes = MergedSizes()
        self._depth = _Depth()
        self.asking = RequestedKernels()
        self.kinds: list[RecordedCalls] = []

    def note_policy(self) -> None:
        """Take note of the policy that holds now in this thread."""
        self.asking.note(active_policy())

    def call(
        self, name: str, op: str, route: Route | None, run: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Return ``run(*args, **kwargs)``; see `context.CallObserver`."""
        depth = self._depth
        if (depth.value and (route is None or route.source == "default")) or measuring() or _tracing():
            return run(*args, **kwargs)
        seen = self._kind(name, op, route, args, kwargs)
        begun = time.time_ns() if not seen.count else 0
        outside = depth.value
        try:
            depth.value = outside + 1
            with self._range_of(seen):
                result = run(*args, **kwargs)
        finally:
            depth.value = outside
        with self._lock:
            if begun and not seen.count:
                seen.first_ns, seen.first_duration_ns = begun, time.time_ns() - begun
            seen.count += 1
        return result

    def _kind(self, name: str, op: str, route: Route | None, args: tuple[Any, ...], kwargs: Any) -> RecordedCalls:
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        shapes = tuple(tuple(t.shape) for t in tensors)
        module, phase = module_paths.current(), phase_of_call(op, name, context.phase(), shapes)
        active = active_policy() if route is None else None
        why: Any = None if active is None else active.policy.kernels.get(op)
        if route is not None:
            why = (route.kernel, route.source, route.asked, route.passed_over, route.native)
        group = (name, op, why, module, phase, *((t.dtype, t.device) for t in tensors))
        key = (group, self._sizes(group, op, name, phase, shapes))
        kind = self._seen.get(key)
        if kind is None:
            with self._lock:
                kind = self._seen.get(key)
                if kind is None:
                    kind = RecordedCalls(len(self.kinds), name, op, route, module, phase, tensors)
                    self.kinds.append(kind)
                    self._seen[key] = kind
            self.note_policy()
        return kind


def _device_of(tensors: list[torch.Tensor]) -> str:
    return str(tensors[0].device) if tensors else "cpu"


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_modes = _private_api.mode_keys


def _tracing() -> bool:
    """Say whether operators are being traced by `torch.compile` or an export: nothing runs then."""
    get = _private_api.dispatch_mode
    return any(get(mode) is not None for mode in (_modes.FAKE, _modes.PROXY, _modes.FUNCTIONAL))
