# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The policy that decides calls, process-wide and in each thread, and the state that calls depend on."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch.autograd import forward_ad

from xpuruntime import _core
from xpuruntime.pytorch import _private_api

if TYPE_CHECKING:
    from xpuruntime.measuring.rounds import Replacement
    from xpuruntime.pytorch.attention.flash_impl import FlexChoice
    from xpuruntime.pytorch.coverage.gaps import CoverageGap
    from xpuruntime.pytorch.dispatch.compiled_policy import CompiledPolicy
    from xpuruntime.pytorch.dispatch.fast_path import FastPath
    from xpuruntime.pytorch.dispatch.policy_scope import InstalledPolicy
    from xpuruntime.pytorch.dispatch.route import Route
    from xpuruntime.pytorch.dispatch.step_cost import RoutePin, StepLag

#: Types of PyTorch by the names that policies use.
DTYPES: dict[torch.dtype, str] = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8",
    torch.int8: "int8",
}

#: Everything that a kernel depends on of a call's arrays, behind a name, as one key; ``None`` where it cannot be seen.
call_key = _core.call_key
#: What is left of the key of an attention's query, key, value and mask without lengths; ``None`` where they count. A
#: kernel that serves one call of a kind may refuse another: who takes the route of a kind is prepared for that.
attention_kind = _core.attention_kind

#: Returns ``"backward"``, ``"train"``, ``"infer"``, ``"prefill"`` or ``"decode"`` for the call of this thread.
#:
#: Compiled code states it, where rules ask for it. Otherwise ``"train"`` is where gradients are recorded, also with
#: ``create_graph=True`` in a backward and where a checkpoint computes its forward again. Inside the forward of a
#: ``torch.autograd.Function``, in which PyTorch records none, it is the phase in which that is called, while
#: `function_phases` are followed. What else runs inside a backward pass is ``"backward"``. The last two are parts of
#: ``"infer"``; see `generation_phases`.
phase = _core.call_phase


def capturing() -> bool:
    """Say whether the current CUDA stream is being captured into a graph."""
    return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def transforms() -> list[Any]:
    """Return the transforms of ``torch.func`` active in this thread, outermost first.

    PyTorch is asked for them only where there are some: whoever asks has a stack of them made for the thread, and from
    then on each node of autograd copies that: 1 % more instructions in a training step of a small model.
    """
    if not _private_api.has_transforms():
        return []
    return list(_private_api.transform_stack() or ())


@functools.cache
def _arch(index: int) -> str:
    return "sm{}{}".format(*torch.cuda.get_device_capability(index))


def arch_of(device: torch.device) -> str | None:
    """Return the architecture of a CUDA device, such as ``"sm90"``; ``None`` for others."""
    if device.type != "cuda":
        return None
    return _arch(torch.cuda.current_device() if device.index is None else device.index)


def has_tangent(x: Any) -> bool:
    """Say whether a tensor carries a derivative in forward mode; not whether one does that it wraps."""
    return isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None


_tracing_state = _private_api.tracing_state


class _ThreadState(threading.local):
    policy: tuple[CompiledPolicy | None] | None = None
    recorded = False
    measuring = False
    route_pin: RoutePin | None = None


class PolicyFrame:
    """The policy of one block, or outside of all: as it was entered, or as `set_kernel_policy` has changed it since."""

    __slots__ = ("active",)

    def __init__(self, active: CompiledPolicy | None = None) -> None:
        self.active = active


class CallObserver(Protocol):
    """Watches calls of overridden operators; see `DispatchContext.watch`."""

    def call(
        self, name: str, op: str, route: Route | None, run: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Return ``run(*args, **kwargs)``, and keep what is to be known of it."""


class DispatchContext:
    """The state of the dispatch of PyTorch's operators. There is one in a process, `CONTEXT`."""

    def __init__(self) -> None:
        self.thread = _ThreadState()
        self.process_policy: CompiledPolicy | None = None
        self.policy_version = 0
        self.own_policies: set[int] = set()
        self.observer: CallObserver | None = None
        self.installed: InstalledPolicy | None = None
        self.frames = [PolicyFrame()]
        self.lost_frames: list[PolicyFrame] = []
        self.changing = False
        self.users: Counter[str] = Counter()
        self.placed: dict[str, list[Any]] = {}
        self.fast_path: FastPath | None = None
        self.compiled_for = ""
        self.compiled_keys = {""}
        self.guards_added = False
        self.unguarded = False
        self.kept_compiled = 0
        self.compile_hooks: list[Any] = []
        self.reported_gaps: set[tuple[int, CoverageGap]] = set()
        self.flex_choices: dict[tuple[str, FlexChoice], None] = {}
        self.policies_by_call: dict[tuple[int, str], CompiledPolicy] = {}
        self.replays = 0
        self.times: dict[tuple[str, str, bool], Replacement] = {}
        #: By device, and whether inside a backward pass.
        self.lags: dict[tuple[int, bool], StepLag] = {}
        #: How often something was prepared while the program waited: kernels measured, compared or compiled.
        self.prepared = 0
        self.route_costs: dict[tuple[str, str, str], float] = {}
        self.unfused_convs: set[tuple[Any, ...]] = set()
        self.switch_claims: dict[str, Any] = {}
        self._lock = threading.Lock()

    def active_policy(self) -> CompiledPolicy | None:
        """Return the policy that decides calls of this thread. None does where ``torch.jit.trace`` records calls."""
        own = self.thread.policy
        policy = self.process_policy if own is None else own[0]
        return policy if policy is None or _tracing_state() is None else None

    def set_process_policy(self, active: CompiledPolicy | None) -> CompiledPolicy | None:
        """Activate a policy in all threads that have none of their own, autograd's included. Returns the former."""
        with self._lock:
            before, self.process_policy = self.process_policy, active
            self._publish()
            self.policy_version += 1
        return before

    def set_thread_policy(self, block: object, policy: tuple[CompiledPolicy | None] | None, *, own: bool) -> None:
        """Set the policy of this thread for a block, or the one around it. `own` says whether the block begins."""
        if not own:
            self.thread.policy = policy
        with self._lock:
            (self.own_policies.add if own else self.own_policies.discard)(id(block))
            self._publish()
        if own:
            self.thread.policy = policy

    def watch(self, observer: CallObserver | None) -> CallObserver | None:
        """Let `observer` watch every call of every overridden operator, in all threads. Returns the one before."""
        with self._lock:
            before, self.observer = self.observer, observer
            self._publish()
        return before

    def _publish(self) -> None:
        active = self.process_policy
        watched = self.observer is not None or bool(self.own_policies)
        if active is None:
            _core.set_guards(None, None, slow=watched, phases=False, modules=False)
        else:
            _core.set_guards(
                active.routes, active.kinds, slow=watched, phases=active.by_phase, modules=active.by_module
            )

    def observe_device(self, device: torch.device) -> None:
        """Observe a device at a call, and have calls decided anew where the steps of the program have changed."""
        if device.type == "cuda" and self.lags:
            lag = self.lags.get((device.index or 0, _private_api.running_backward() != -1))
            if lag is not None and lag.observe():
                self.forget_tuned_routes()

    def forget_tuned_routes(self) -> None:
        """Have the process-wide policy, and the one of this thread, decide tuned calls anew."""
        for active in (self.process_policy, self.active_policy()):
            if active is not None:
                active.forget_tuned()


CONTEXT = DispatchContext()
active_policy = CONTEXT.active_policy
forget_tuned_routes = CONTEXT.forget_tuned_routes
set_process_policy = CONTEXT.set_process_policy
watch = CONTEXT.watch


def policy_version() -> int:
    """Return a number that is another one whenever another policy is active process-wide."""
    return CONTEXT.policy_version


class thread_policy:  # noqa: N801 - used like a function
    """Make a policy active for the calls of this thread inside a ``with`` block, whatever is active process-wide.

    Autograd's threads do not see it: for inference. The overrides that it needs must be in place; see
    `xpuruntime.pytorch.dispatch.overrides.registry.require`.
    """

    __slots__ = ("_active", "_before", "_entered")

    def __init__(self, active: CompiledPolicy | None) -> None:
        self._active = (active,)
        self._before: tuple[CompiledPolicy | None] | None = None
        self._entered = False

    def _enter(self) -> None:
        self._before = CONTEXT.thread.policy
        self._entered = True
        CONTEXT.set_thread_policy(self, self._active, own=True)

    def _leave(self, *_: object) -> None:
        if self._entered:
            CONTEXT.set_thread_policy(self, self._before, own=False)
            self._entered = False

    __enter__ = _core.guarded(_enter, _leave)
    __exit__ = _core.guarded(_leave, _leave)


def is_compiling() -> bool:
    """Say whether `torch.compile` or an export traces in this thread, so that nothing runs yet."""
    # 2.11 and 2.12 do not say that they compile once AOTAutograd traces.
    return torch.compiler.is_compiling() or _private_api.tracing_context.try_get() is not None


_Result = TypeVar("_Result")


def in_clean_thread(probe: Callable[..., _Result], *args: Any, **kwargs: Any) -> _Result:
    """Call a probe in a thread of its own, without gradients, a policy, modes, autocast and profilers."""

    def run() -> _Result:
        with torch.no_grad(), thread_policy(None):
            return probe(*args, **kwargs)

    with ThreadPoolExecutor(1, "xpuruntime-probe") as pool:
        return pool.submit(run).result()
