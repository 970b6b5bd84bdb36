# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`TrainingPolicy`: a training under a policy, with its evidence, its lock, and what differs between ranks.

It needs PyTorch alone. The other modules fit it to frameworks: they log its metrics, and keep its lock in checkpoints.
"""

from __future__ import annotations

import json
import platform
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from xpuruntime.argument_types import COUNT, check_types
from xpuruntime.errors import InputError, LockError
from xpuruntime.files.writing import replace_file
from xpuruntime.lockfile.canonical import load_lock, save_lock
from xpuruntime.lockfile.records import Lock
from xpuruntime.lockfile.rules import policy_record, without_lock
from xpuruntime.policies import Policy
from xpuruntime.pytorch.dispatch.context import active_policy
from xpuruntime.pytorch.dispatch.policy_scope import kernel_policy
from xpuruntime.pytorch.explanation.explain import explain
from xpuruntime.pytorch.rank_agreement import RankAgreement
from xpuruntime.pytorch.training_lock import check_locked, lock
from xpuruntime.runtime.telemetry import log_decision

if TYPE_CHECKING:
    import os

    from xpuruntime.policies import KernelPolicy
    from xpuruntime.pytorch.explanation.explanation import Explanation

    PolicyLike = Policy | KernelPolicy | str | os.PathLike[str] | Mapping[str, Any]

#: Names of the files in a checkpoint.
LOCK_FILE, EVIDENCE_FILE, RANKS_FILE = "xpuruntime.lock", "xpuruntime-evidence.json", "xpuruntime-ranks.json"


class TrainingPolicy:
    """Context of a training: its policy is active inside, and one of its steps is explained and locked.

    Steps are those of the first optimizer that steps inside, so that an accumulation of gradients is one. Records of
    the logger ``xpuruntime.train`` tell what was found.

    Parameters
    ----------
    policy : Policy, KernelPolicy, path, or dict, optional
        As for `xpuruntime.pytorch.kernel_policy`.
    model : torch.nn.Module, optional
        The root of the paths in rules; default: the largest module that has been called.
    evidence_step : int
        The step that is explained, from 1; its time is longer. The first one does what is done once as well.
    resume : path or Lock, optional
        A training lock, or a folder with one, as `save` writes it. It has to hold here, its kernels are replayed, and
        the explained step has to run as it records.
    on_evidence : callable, optional
        Called with this once the step is explained.
    rank_timeout : float
        As of `xpuruntime.pytorch.RankAgreement`, which the processes of ``torch.distributed`` train in.

    Attributes
    ----------
    step : int
        Steps that have ended.
    unmatched : tuple of str
        Rules for modules that matched no call of the first step.
    evidence : Explanation or None
        Of the step; ``None`` until it has ended.
    lock : Lock or None
        The kernels of the step; ``None`` also where it cannot be locked, which is logged.
    rank_differences : tuple of str
        Kernels and libraries of the step that are not the same in all processes of ``torch.distributed``, with the rank
        that differs from most.
    rank_report : dict or None
        Evidence of all processes together: kernels, libraries, host and device of each rank, ``differences``, and the
        ranks that are ``odd``. `save` writes it.

    Raises
    ------
    EngineError
        Another rank failed, ended, or was silent for `rank_timeout` seconds.
    LockError
        The lock does not hold, is of another policy, or the explained step ran otherwise.
    PolicyError
        As `xpuruntime.pytorch.kernel_policy`.

    Examples
    --------
    >>> import torch
    >>> from xpuruntime.integrations.training import TrainingPolicy
    >>> net = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(net.parameters())
    >>> with TrainingPolicy({"kernels": {"matmul": "cpu.blas"}}, net) as run:
    ...     for _ in range(3):
    ...         net(torch.ones(3, 4)).sum().backward()
    ...         optimizer.step()
    >>> run.evidence.coverage.covered
    1.0
    """

    def __init__(
        self,
        policy: PolicyLike | None = None,
        model: torch.nn.Module | None = None,
        *,
        evidence_step: int = 2,
        resume: Lock | str | os.PathLike[str] | None = None,
        on_evidence: Callable[[TrainingPolicy], object] | None = None,
        rank_timeout: float = 1800.0,
    ) -> None:
        check_types({"evidence_step": COUNT}, {"evidence_step": evidence_step})
        if evidence_step < 1:
            raise InputError(f"evidence_step is {evidence_step}: give the number of a step, 1 or more")
        self._policy = None if policy is None else without_lock(Policy.coerce(policy))  # type: ignore[arg-type]
        self._model, self._evidence_step, self._on_evidence = model, evidence_step, on_evidence
        self._resumed: tuple[Lock, str] | None = None
        self._scope: kernel_policy | None = None
        self._explain: tuple[explain, Explanation] | None = None
        self._hook: Any = None
        self._optimizer: Callable[[], torch.optim.Optimizer | None] | None = None
        self.step = 0
        self.unmatched: tuple[str, ...] = ()
        self.evidence: Explanation | None = None
        self.lock: Lock | None = None
        self.rank_differences: tuple[str, ...] = ()
        self.rank_report: dict[str, Any] | None = None
        self._rank_timeout = rank_timeout
        self._ranks: RankAgreement | None = None
        if resume is not None:
            self.resume(resume)

    def resume(self, lock: Lock | str | os.PathLike[str]) -> None:
        """Go on under a lock, or under that of a folder; see the parameter. Inside of the block too."""
        if not isinstance(lock, Lock):
            file = Path(lock)
            file = file / LOCK_FILE if file.is_dir() else file
            held, where = load_lock(file), str(file)
        else:
            held, where = lock, lock.digest
        locked = held.identity.policy
        if self._policy is not None and locked is not None and policy_record(self._policy).sha256 != locked.sha256:
            raise LockError(
                f"{where} was made under another policy than this training has. Fix: give the policy of the lock, or "
                "remove the lock from the checkpoint to train under the new one"
            )
        replay = kernel_policy(root=self._model, lock=held)
        log_decision("train", "INFO", "lock", f"{where} holds, and is replayed", lock=where, digest=held.digest)
        self._resumed, before = (held, where), self._scope
        if before is not None:
            replay.__enter__()
            self._scope = replay
            before.__exit__(None, None, None)

    def _entered(self) -> kernel_policy:
        if self._resumed is not None:
            scope = kernel_policy(root=self._model, lock=self._resumed[0])
        else:
            scope = kernel_policy(self._policy, root=None if self._policy is None else self._model)
        scope.__enter__()
        return scope

    def __enter__(self) -> Self:
        if self._scope is not None or self.step:
            raise InputError("this training was entered already. Fix: make a new TrainingPolicy for each")
        self._ranks = RankAgreement(self._rank_timeout).__enter__()
        try:
            self._scope = self._entered()
            self._hook = register_optimizer_step_post_hook(self._stepped)
            self._begin_evidence()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the policy, however the training ended. Idempotent."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        scope, self._scope = self._scope, None
        try:
            self._drop_evidence(error)
        finally:
            ranks, self._ranks = self._ranks, None
            try:
                if scope is not None:
                    scope.__exit__(kind, error, trace)
            finally:
                if ranks is not None:
                    ranks.__exit__(kind, error, trace)

    def _stepped(self, optimizer: torch.optim.Optimizer, _args: Any, _options: Any) -> None:
        if self._optimizer is None:
            self._optimizer = weakref.ref(optimizer)
        if self._optimizer() is not optimizer:
            return
        self.step += 1
        if self.step == 1:
            active = active_policy()
            self.unmatched = () if active is None else tuple(active.rule_use.unmatched())
            for sentence in self.unmatched:
                log_decision("train", "WARNING", "unmatched", sentence)
        if self.step == self._evidence_step:
            self._end_evidence()
        self._begin_evidence()

    def _begin_evidence(self) -> None:
        if self.step == self._evidence_step - 1:
            block = explain(root=self._model)
            self._explain = block, block.__enter__()

    def _end_evidence(self) -> None:
        assert self._explain is not None
        (block, explanation), self._explain = self._explain, None
        failure = None
        try:
            block.__exit__(None, None, None)
            self.evidence = explanation
            self._lock_evidence(self.evidence)
        except Exception as error:  # other processes wait for what this one has to say
            failure = error
        self._compare_ranks()
        if failure is not None:
            raise failure
        facts, level = self.metrics, "INFO"
        if self.evidence is not None and (facts["substituted"] or facts["bypassed"] or self.rank_differences):
            level = "WARNING"
        text = f"step {self.step}: {facts['covered']:.1%} of the time that the policy can affect ran as it asks"
        log_decision("train", level, "evidence", text, step=self.step, **facts)
        if self._on_evidence is not None:
            self._on_evidence(self)

    def _drop_evidence(self, error: BaseException | None) -> None:
        running, self._explain = self._explain, None
        if running is not None:
            stopped = error or StopIteration("the training ended")
            running[0].__exit__(type(stopped), stopped, None)
        if self.evidence is None and error is None:
            text = f"there is no evidence: it is of step {self._evidence_step}, and the training had {self.step}"
            log_decision("train", "WARNING", "evidence", text, step=self.step)

    def _lock_evidence(self, explanation: Explanation) -> None:
        try:
            self.lock = lock(explanation) if self._resumed is None else check_locked(explanation, *self._resumed)
        except (InputError, LockError) as error:
            if self._resumed is not None:
                raise
            log_decision("train", "WARNING", "lock", f"step {self.step} has no lock: {error}")

    def _compare_ranks(self) -> None:
        """Gather the evidence of all processes, and name those that differ from most."""
        if self._ranks is None or self._ranks.count == 1:
            return
        kernels: dict[str, set[str]] = {}
        for row in () if self.evidence is None else self.evidence.rows:
            if row.op:
                name = " ".join(part for part in (row.op, row.module, row.phase, *row.dtypes) if part)
                kernels.setdefault(name, set()).add(row.resolved or row.status)
        validators = () if self.lock is None else self.lock.identity.validators
        report: dict[str, Any] = {
            "rank": self._ranks.rank,
            "host": platform.node(),
            "lock": None if self.lock is None else self.lock.digest,
            "kernels": {name: " and ".join(sorted(kernel)) for name, kernel in kernels.items()},
            "libraries": {
                "device" if fact.kind == "device" else f"{fact.kind} {fact.key}": str(fact.expect)
                for fact in validators
            },
        }  # fmt: skip
        reports = self._ranks.gather(report)
        locked = [report for report in reports if report["lock"] is not None]
        without = [report["rank"] for report in reports if report["lock"] is None] if locked else []
        differences, odd = (
            [f"rank {rank} has no lock, so its libraries are not compared" for rank in without],
            {*without},
        )
        for part, verb, compared in (("kernels", "ran", reports), ("libraries", "has", locked)):
            for name in sorted({name for report in compared for name in report[part]}):
                values = {report["rank"]: report[part].get(name, "nothing") for report in compared}
                usual = Counter(values.values()).most_common(1)[0][0]  # the first one of the most frequent
                has_it = next(rank for rank in values if values[rank] == usual)
                differing = [rank for rank in values if values[rank] != usual]
                odd |= {*differing}
                differences += [
                    f"{name}: rank {rank} {verb} {values[rank]}, rank {has_it} {usual}" for rank in differing
                ]
        self.rank_differences = tuple(differences)
        self.rank_report = {
            "schema": "xpuruntime.ranks/1", "step": self.step, "ranks": reports, "differences": differences,
            "odd": sorted(odd),
        }  # fmt: skip
        for sentence in self.rank_differences:
            log_decision("train", "WARNING", "rank_difference", sentence)

    @property
    def metrics(self) -> dict[str, float]:
        """Numbers of the evidence for a tracker: shares of time from 0 to 1, and counts; empty before it is there."""
        if self.evidence is None:
            return {}
        coverage = self.evidence.coverage
        shares = {name: getattr(coverage, name) for name in ("covered", "honoured", "substituted", "bypassed")}
        counts = {"unmatched": len(self.evidence.unmatched), "rank_differences": len(self.rank_differences)}
        return {**shares, **{name: float(count) for name, count in counts.items()}}

    def save(self, folder: str | os.PathLike[str]) -> Path | None:
        """Write the lock and the evidence into a checkpoint; returns the lock, ``None`` where there is none yet."""
        if self.lock is None or self.evidence is None:
            why = "the step is not explained yet" if self.evidence is None else "the step could not be locked"
            log_decision("train", "WARNING", "lock", f"{folder} gets no lock: {why}", step=self.step)
            return None
        path = Path(folder)
        replace_file(path / EVIDENCE_FILE, f"{self.evidence.to_json()}\n".encode(), private=False)
        if self.rank_report is not None:
            replace_file(path / RANKS_FILE, f"{json.dumps(self.rank_report, indent=1)}\n".encode(), private=False)
        return save_lock(self.lock, path / LOCK_FILE)


def lock_in(folder: str | os.PathLike[str]) -> Path | None:
    """Return the lock of a checkpoint, if it has one; where it has none, that is logged."""
    file = Path(folder) / LOCK_FILE
    if file.is_file():
        return file
    log_decision("train", "WARNING", "lock", f"the checkpoint {folder} has no lock, so none is verified")
    return None
