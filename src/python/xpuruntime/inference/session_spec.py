# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`SessionSpec`: the arguments of a session as a value that can be pickled and opened in another process."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.argument_types import FLAG, TEXTS, check_types
from xpuruntime.errors import InputError
from xpuruntime.files.paths import user_path
from xpuruntime.planning.plan import Plan
from xpuruntime.policies import Policy
from xpuruntime.policies.kinds import in_folder

if TYPE_CHECKING:
    from xpuruntime.inference.session import InferenceSession


class SessionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of an `InferenceSession`, frozen: pickle it, send it, and open it in another process.

    A session itself cannot be pickled, since it holds an engine's memory and threads.

    Parameters
    ----------
    model : str or path
        A model file or a compiled artifact. Kept as an absolute path; the file is read by `open`.
    policy : Policy, path, mapping, or ``"auto"``, optional
        Read now: a policy file that changes later does not change the spec. Left out, that of the model or the plan.
    device : str, optional
    engine : str or tuple of str, optional
    plan : Plan, optional
        Open exactly this plan; see `InferenceSession`.
    lock : str or path, optional
        A lock file to open under, kept as an absolute path; not beside a plan.
    trust : bool
        As for `InferenceSession`.

    Examples
    --------
    >>> import pickle, xpuruntime as xrt
    >>> spec = xrt.SessionSpec(model=xrt.demo_model_path(), device="cpu")
    >>> with pickle.loads(pickle.dumps(spec)).open() as session:
    ...     session.plan.engine
    'onnxruntime'
    """

    model: Any
    policy: Any = None
    device: str | None = None
    engine: str | tuple[str, ...] | None = None
    plan: Plan | None = None
    lock: Any = None
    trust: bool = False

    def __post_init__(self) -> None:
        """Make the paths absolute and read the policy. Raises InputError, PolicyError or TypeError."""
        if not isinstance(self.model, (str, os.PathLike)):
            raise TypeError(
                f"the model of a SessionSpec is a path, not an object of type {type(self.model).__name__}: export a "
                "module first, for example with torch.export.save"
            )
        if self.plan is not None and not isinstance(self.plan, Plan):
            raise InputError(f"plan is an object of type {type(self.plan).__name__}. Fix: read it with Plan.from_json")
        check_types(
            {"trust": FLAG, "engine": TEXTS}, {"trust": self.trust, "engine": self.engine}, optional=("engine",)
        )
        put = msgspec.structs.force_setattr
        put(self, "model", os.path.abspath(user_path(self.model, "the model")))  # noqa: PTH100 - keeps links
        if self.lock is not None:
            if self.plan is not None:
                raise InputError("a lock has a plan of its own. Fix: leave out plan, or lock")
            put(self, "lock", os.path.abspath(user_path(self.lock, "the lock")))  # noqa: PTH100 - keeps links
        if self.policy is not None:
            put(self, "policy", Policy.coerce(self.policy).relocated(in_folder("")))
        if isinstance(self.engine, list):
            put(self, "engine", tuple(self.engine))

    def open(self) -> InferenceSession:
        """Open a session.

        Raises
        ------
        XpuRuntimeError
            As `InferenceSession`.
        """
        from xpuruntime.inference.session import InferenceSession

        return InferenceSession(
            self.model,
            device=self.device,
            engine=self.engine,
            policy=self.policy,
            plan=self.plan,
            lock=self.lock,
            trust=self.trust,
        )
