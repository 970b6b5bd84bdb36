# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Subject`: the session that is verified, with its policy, inputs and limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from xpuruntime.locks.verification.claims import Claim
from xpuruntime.policies.document import position_of
from xpuruntime.policies.verify_policy import VerifyPolicy

if TYPE_CHECKING:
    from collections.abc import Callable

    from xpuruntime.inference import InferenceSession
    from xpuruntime.lockfile.records import Lock
    from xpuruntime.locks.verification.sections.metrics import FileMetric, Metric
    from xpuruntime.policies import Policy
    from xpuruntime.policies.files import Document

__all__ = ["Subject"]


class Subject(NamedTuple):
    """Session, policy, inputs and limits that the sections share."""

    session: InferenceSession
    model: Any
    document: Document | None
    feeds: dict[str, Any]
    given: bool
    reopen: Callable[[], InferenceSession]
    opened_s: float
    metrics: tuple[Metric | FileMetric, ...]
    asked: frozenset[str]
    budget: float | None
    against: str | None
    lock: str | None
    locked: Lock | None
    options: dict[str, Any]

    @property
    def policy(self) -> Policy:
        """The policy of the session."""
        return self.session.policy

    @property
    def trust(self) -> bool:
        """Whether the session was opened with ``trust``."""
        trusted: bool = self.options["trust"]
        return trusted

    @property
    def limits(self) -> VerifyPolicy:
        """The policy's section ``verify``, or its defaults."""
        return self.policy.verify or VerifyPolicy()

    def placed(self, claim: Claim, key: str) -> Claim:
        """Return a claim with the policy key that states it, and where the policy file does so."""
        place = None if self.document is None else position_of(self.document.root, key)
        line, column = place or (None, None)
        return msgspec.structs.replace(claim, key=key, line=line, column=column)
