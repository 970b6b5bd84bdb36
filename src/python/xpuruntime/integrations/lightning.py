# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`PolicyCallback`: a policy for the trainer of Lightning, of the package `lightning` or `pytorch_lightning`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from xpuruntime.integrations import needs
from xpuruntime.integrations.training import LOCK_FILE, TrainingPolicy
from xpuruntime.lockfile.canonical import lock_bytes, parse_lock

# Installing `lightning` installs both; the program has imported the one that it uses.
with needs("Lightning", "pip install lightning"):
    if "lightning.pytorch" not in sys.modules and "pytorch_lightning" in sys.modules:
        from pytorch_lightning import Callback
    else:
        try:
            from lightning.pytorch import Callback
        except ModuleNotFoundError:
            from pytorch_lightning import Callback

if TYPE_CHECKING:
    from xpuruntime.integrations.training import PolicyLike


class PolicyCallback(Callback):  # type: ignore[misc]
    """Trains under a policy, logs its coverage, and keeps the lock of the training in each checkpoint.

    The policy is active from the first step of ``Trainer.fit`` to the last, and no longer where that raises or is
    interrupted. A training that is resumed from a checkpoint runs under the lock in it, which has to hold.

    Parameters
    ----------
    policy : Policy, KernelPolicy, path, or dict, optional
    evidence_step : int
        As for `xpuruntime.integrations.training.TrainingPolicy`.

    Attributes
    ----------
    run : TrainingPolicy or None
        Of the last training.
    """

    def __init__(self, policy: PolicyLike | None = None, *, evidence_step: int = 2) -> None:
        self._policy, self._evidence_step = policy, evidence_step
        self._resumed: str | None = None
        self._logged = False
        self.run: TrainingPolicy | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Enter the policy."""
        run = TrainingPolicy(self._policy, pl_module, evidence_step=self._evidence_step)
        if self._resumed is not None:
            run.resume(parse_lock(self._resumed, "the lock of the checkpoint"))
        self._logged, self.run = False, run.__enter__()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Log the metrics once they are there."""
        if self.run is not None and self.run.evidence is not None and not self._logged:
            self._logged = True
            metrics = {f"xpuruntime/{name}": value for name, value in self.run.metrics.items()}
            pl_module.log_dict(metrics, rank_zero_only=True)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave the policy."""
        if self.run is not None:
            self.run.__exit__(None, None, None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave the policy; Lightning calls this for an interruption too."""
        if self.run is not None:
            self.run.__exit__(type(exception), exception, exception.__traceback__)

    def state_dict(self) -> dict[str, Any]:
        """Return the lock, as text, for the checkpoint."""
        lock = None if self.run is None else self.run.lock
        return {} if lock is None else {LOCK_FILE: lock_bytes(lock).decode()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the lock of a checkpoint."""
        self._resumed = state_dict.get(LOCK_FILE)
