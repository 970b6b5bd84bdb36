# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`SessionArguments`: what is requested of a session besides its model, and the policy that it makes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from xpuruntime.argument_types import FLAG, PATH, TEXTS, check_types
from xpuruntime.errors import InputError, PolicyError

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from xpuruntime.policies import ExecutionPolicy, KernelPolicy, Policy
    from xpuruntime.policies.execution_policy import Precision

    #: The path of a model file, the bytes of an ONNX model, an ``onnx.ModelProto``, or a ``torch.nn.Module``.
    ModelLike = str | os.PathLike[str] | Any
    PolicyLike = Policy | str | os.PathLike[str] | Mapping[str, Any]

__all__ = ["PolicyAliases", "SessionArguments"]


class PolicyAliases(TypedDict, total=False):
    """Other ways to state a part of the policy, beside `policy`, `engine` and `precision`.

    Attributes
    ----------
    kernel_policy : KernelPolicy
        Replaces the policy's kernels.
    exec_policy : ExecutionPolicy
        Replaces the policy's execution section.
    backend : str or sequence of str
        The same as `engine`.
    fp16 : bool
        The same as ``precision="fp16"``.
    """

    kernel_policy: KernelPolicy | None
    exec_policy: ExecutionPolicy | None
    backend: str | Sequence[str] | None
    fp16: bool


class SessionArguments(NamedTuple):
    """The arguments of `InferenceSession` that decide its policy, trust and lock, under the same names."""

    policy: PolicyLike | None = None
    device: str | None = None
    engine: str | Sequence[str] | None = None
    precision: Precision | None = None
    lock: str | os.PathLike[str] | None = None
    frozen: bool = False
    trust: bool = False
    kernel_policy: KernelPolicy | None = None
    exec_policy: ExecutionPolicy | None = None
    backend: str | Sequence[str] | None = None
    fp16: bool = False

    def with_aliases(self, aliases: Mapping[str, Any], function: str) -> SessionArguments:
        """Return it with `PolicyAliases`; other keywords are refused as Python does. Raises TypeError."""
        for name in aliases:
            if name not in PolicyAliases.__annotations__:
                raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
        return self._replace(**aliases)

    def check_types(self) -> None:
        """Refuse what has a wrong type and is not checked by the policy. Raises TypeError."""
        types = {"fp16": FLAG, "trust": FLAG, "frozen": FLAG, "lock": PATH, "engine": TEXTS, "backend": TEXTS}
        check_types(types, self._asdict(), optional=("engine", "backend", "lock"))

    def stated_arguments(self) -> list[str]:
        """Return the names of the arguments that state a part of the policy."""
        names = ("device", "engine", "kernel_policy", "exec_policy", "policy", "precision", "backend")
        return [name for name in names if getattr(self, name) is not None] + (["fp16"] if self.fp16 else [])

    def check_frozen(self) -> None:
        """Refuse what contradicts `frozen`. Raises `InputError` or `PolicyError`."""
        if self.lock is None:
            raise InputError("frozen takes the policy from a lock, and none is named. Fix: name it with lock= (--lock)")
        if given := self.stated_arguments():
            raise PolicyError(f"frozen takes the policy from the lock; leave out {', '.join(given)}, or frozen")

    def merged(self, policy: PolicyLike | None) -> Policy:
        """Return `policy` with the other arguments in it, and its paths absolute.

        Raises `PolicyError` where they contradict each other.
        """
        from xpuruntime.policies import Policy
        from xpuruntime.policies.kinds import in_folder

        engine, backend, precision = self.engine, self.backend, self.precision
        if engine is not None and backend is not None and engine != backend:
            raise PolicyError(
                f"engine={engine!r} and backend={backend!r} contradict each other; backend is an alias, state one of "
                "them"
            )
        if self.fp16 and precision not in (None, "fp16"):
            raise PolicyError(f"fp16=True and precision={precision!r} contradict each other; state one of them")
        made = Policy.coerce(policy).with_overrides(
            device=self.device,
            engine=engine if engine is not None else backend,
            precision="fp16" if self.fp16 else precision,
            kernel_policy=self.kernel_policy,
            exec_policy=self.exec_policy,
        )
        return made.relocated(in_folder(""))
