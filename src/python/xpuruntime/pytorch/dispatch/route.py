# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Route`: the kernel that serves a call of an overridden operator, found from the facts of the call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from xpuruntime import _core
from xpuruntime.errors import UnsupportedOperationError
from xpuruntime.ops.call_context import CallContext, kernel_ids, prepare, tuning_rule
from xpuruntime.policies.call_facts import UNKNOWN, CallFacts, Fact, unknown_sizes
from xpuruntime.policies.document import nearest, question
from xpuruntime.policies.kernel_rules import FAMILIES, KERNEL_IDS, TENSOR_OPS
from xpuruntime.pytorch.attention.sdpa_backends import backend_request
from xpuruntime.pytorch.dispatch.context import DTYPES, arch_of

if TYPE_CHECKING:
    from xpuruntime.errors import XpuRuntimeError
    from xpuruntime.policies import Policy
    from xpuruntime.pytorch.dispatch.step_cost import StepLag
    from xpuruntime.pytorch.providers.bound import BoundKernel

#: Operation to the kernel names that mean a kernel of PyTorch's own, each with the id it goes by.
NATIVE_NAMES: dict[str, dict[str, str]] = {
    "matmul": dict.fromkeys(("torch", "inductor", "torch.mm"), "torch.mm"),
    "attention": {
        "torch": "torch.sdpa",
        "inductor": "torch.sdpa",
        "torch.sdpa": "torch.sdpa",
        "flash_v2": "torch.flash",
        "torch.flash": "torch.flash",
        "efficient": "torch.efficient",
        "torch.efficient": "torch.efficient",
        "cudnn": "torch.cudnn",
        "torch.cudnn": "torch.cudnn",
        "math": "torch.math",
        "torch.math": "torch.math",
    },
    "layer_norm": dict.fromkeys(("torch", "inductor", "torch.layer_norm"), "torch.layer_norm"),
    "rms_norm": dict.fromkeys(("torch", "inductor", "torch.rms_norm"), "torch.rms_norm"),
    **{op: dict.fromkeys(("torch", "inductor", f"torch.{op}"), f"torch.{op}") for op in ("conv", *TENSOR_OPS)},
}
#: The source of kernels that a call itself names.
BY_CALL = "kernel="
#: What PyTorch runs where a policy leaves the choice.
DEFAULT_ID = {op: f"torch.{op}" for op in FAMILIES} | {"matmul": "torch.mm", "attention": "torch.sdpa"}


def facts_of_call(
    op: str,
    *,
    device: torch.device | str | None,
    dtype: torch.dtype | str | None,
    phase: Fact[str],
    module: str,
    node: str | None = None,
    sizes: Mapping[str, int] | None = None,
) -> CallFacts:
    """Return the facts of a call."""
    kind, arch = _device(device)
    dtype_name: Any = UNKNOWN
    if isinstance(dtype, torch.dtype):
        dtype_name = DTYPES.get(dtype)
    elif dtype:
        dtype_name = dtype
    known: dict[str, Any] = {**(unknown_sizes(op) if sizes is None else sizes)}
    return CallFacts(
        op=op,
        dtype=dtype_name,
        device=kind,
        arch=arch,
        phase=phase or None,
        module=module or None,
        node=node or module or None,
        **known,
    )


def _device(device: torch.device | str | None) -> tuple[Fact[str], Fact[str]]:
    if not device:
        return UNKNOWN, UNKNOWN
    if device == "cuda":
        return device, UNKNOWN
    torch_device = torch.device(device)
    if torch_device.type != "cuda":
        return torch_device.type, None
    return f"cuda:{torch_device.index or 0}", arch_of(torch_device)


#: A kernel that was measured, the microseconds of a call, and the most bytes that it holds, where that is known.
Measured: TypeAlias = tuple[str, float, int | None]


class Route:
    """Which kernel serves calls of one kind. Immutable but for `place`'s own memory of choices."""

    __slots__ = (
        "asked", "backend_request", "kernel", "lags", "module", "op", "open", "passed_over", "phase", "place", "plan",
        "quick", "source", "times", "tuned",
    )  # fmt: skip

    def __init__(
        self,
        op: str,
        asked: tuple[str, ...],
        source: str,
        kernel: str,
        *,
        place: CallContext | BoundKernel | None = None,
        passed_over: tuple[tuple[str, str], ...] = (),
        module: str = "",
        phase: str = "",
        tuned: bool = False,
        times: tuple[Measured, ...] = (),
    ) -> None:
        self.op = op
        self.asked = asked
        self.source = source
        self.kernel = kernel
        self.place = place
        self.passed_over = passed_over
        self.module = module
        self.phase = phase
        self.tuned = tuned
        self.times = times
        self.open = False
        self.lags: tuple[StepLag, ...] = ()
        self.plan: Any = None
        self.quick = False
        self.backend_request = backend_request(kernel, tuned=tuned) if place is None else None

    def __repr__(self) -> str:
        return f"Route({self.op} by {self.kernel}, asked {', '.join(self.asked)} by {self.source})"

    def for_other_sizes(self) -> Route:
        """Return the same route for calls of other sizes, which have a plan of their own."""
        return Route(
            self.op, self.asked, self.source, self.kernel, place=self.place, module=self.module, phase=self.phase
        )

    @property
    def native(self) -> bool:
        """Whether PyTorch's own kernel serves."""
        return self.place is None

    @property
    def reasons(self) -> str:
        """Why the kernel names that were passed over cannot serve, in one line."""
        return "; ".join(f"{kernel_name}: {reason}" for kernel_name, reason in self.passed_over)

    @property
    def status(self) -> str:
        """Return ``"default"``, ``"honoured"``, or ``"substituted"`` where nothing that was asked for could serve."""
        if self.source == "default":
            return "default"
        return "substituted" if len(self.passed_over) == len(self.asked) else "honoured"


def place_for(
    policy: Policy,
    op: str,
    kernel_names: Sequence[str],
    source: str,
    *,
    module: str,
    allow_tf32: bool,
    deterministic: bool,
    log: _core.DecisionLog | None,
) -> CallContext:
    """Return the context under which `_core` serves a call by one of `kernel_names`, and refuses it otherwise.

    Decisions are recorded in `log`; for ``None``, in that of the process.
    """
    prepare()
    default = {"match": {"op": op}, "use": list(kernel_names), "source": source}
    rules = _core.KernelRules(
        defaults=[default], enforcement="strict", auto_strategy=policy.kernels.auto_strategy, log=log,
        **tuning_rule(policy.kernels),
    )  # fmt: skip
    site = _core.CallSite(rules, module=module)
    return CallContext(
        site=site, allow_tf32=allow_tf32, deterministic=deterministic, policy=policy, below_autograd=True
    )


def reason_of(error: XpuRuntimeError, op: str, kernel_name: str) -> str:
    """Return why the kernels that a name means do not serve, of an error of `_core`."""
    name = kernel_name.partition("@")[0]
    ids = kernel_ids(op, name)
    if not ids:
        return _unknown(op, name)
    candidates = error.candidates if isinstance(error, UnsupportedOperationError) else ()
    reasons = {candidate: reason for candidate, reason in candidates if candidate.partition("@")[0] in ids}
    if len(reasons) == 1:
        return next(iter(reasons.values()))
    return "; ".join(f"{candidate}: {reason}" for candidate, reason in reasons.items()) or error.reason


def _unknown(op: str, name: str) -> str:
    if name in FAMILIES[op]:
        return f"neither PyTorch nor this library has {FAMILIES[op][name]} here"
    if name in KERNEL_IDS:
        return "it is not in this build of xpuruntime; `xrt doctor` says what is missing"
    known = [
        *kernel_ids(op, name.partition(".")[0]),
        *(kernel_id for kernel_id, (ops, _) in KERNEL_IDS.items() if op in ops),
    ]
    hint = question(nearest(name, known), ";")
    return f"there is no such kernel{hint} `xrt kernels` lists them, those of installed plugins too"


def call_fix(route: Route, rule: str = "", *, strict: bool = False) -> str:
    """Return what to do about calls that run, or would run, by another kernel than was asked for."""
    if route.source == BY_CALL:
        return "name another kernel, or several in a list that ends in 'torch', or leave kernel= out"
    last = "put 'auto' last, or use mode: prefer" if strict else "or put 'auto' last"
    return f"add a rule for these calls with use: torch{rule}, {last}"


def refuse(
    route: Route, description: str, keys: Mapping[str, str], *, with_vector: bool = False
) -> UnsupportedOperationError:
    """Return the error for a call that nothing a strict policy asks for can serve; `keys` as of `CompiledPolicy`."""
    rule = ", {match: {op: matmul, n: 1}, use: torch}" if with_vector else ""
    key = keys.get(route.source, route.source)
    msg = f"{description}: {key} asks for {', '.join(route.asked)}, which cannot serve it: {route.reasons}"
    if "Fix: " not in route.reasons:
        msg = f"{msg}. Fix: {call_fix(route, rule, strict=True)}"
    error = UnsupportedOperationError(msg, engine="torch")
    error.passed_over = route.passed_over
    return error
