# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`PolicyCallback`: a policy for `transformers.Trainer`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from xpuruntime.errors import InputError
from xpuruntime.integrations import needs
from xpuruntime.integrations.training import TrainingPolicy, lock_in

with needs("The trainer of transformers", "pip install 'transformers[torch]'"):
    import transformers
    from transformers.trainer_utils import get_last_checkpoint

if TYPE_CHECKING:
    from xpuruntime.integrations.training import PolicyLike


class PolicyCallback(transformers.TrainerCallback):  # type: ignore[misc]
    """Trains under a policy, logs its coverage, and keeps the lock of the training in each checkpoint.

    Give it to the constructor, ``Trainer(..., callbacks=[PolicyCallback(policy)])``: the policy is active in
    ``Trainer.train`` and in nothing else, also where that raises. A training that is resumed from a checkpoint runs
    under the lock in it, which has to hold.

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
        self.run: TrainingPolicy | None = None
        self._wrapped = self._logged = False

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Put the policy around the training of the trainer that is being made."""
        trainer = _caller()
        train = trainer.train

        def train_under_policy(resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any) -> Any:
            # With model_init the model is made inside of the call.
            model = None if trainer.model_init is not None else trainer.model
            folder = resume_from_checkpoint
            folder = get_last_checkpoint(trainer.args.output_dir) if folder is True else folder
            resume = lock_in(folder) if folder else None
            self._logged = False
            self.run = TrainingPolicy(self._policy, model, evidence_step=self._evidence_step, resume=resume)
            with self.run:
                return train(resume_from_checkpoint, *args, **options)

        trainer.train, self._trainer, self._wrapped = train_under_policy, trainer, True

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Refuse a training that the policy is not around."""
        if not self._wrapped:
            raise InputError(
                "PolicyCallback was added to a trainer that exists. Fix: give it to the constructor, "
                "Trainer(..., callbacks=[PolicyCallback(...)])"
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Log the metrics once they are there."""
        if self.run is not None and self.run.evidence is not None and not self._logged:
            self._logged = True
            self._trainer.log({f"xpuruntime/{name}": value for name, value in self.run.metrics.items()})

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write lock and evidence into the checkpoint."""
        if self.run is not None and state.is_world_process_zero:
            self.run.save(f"{args.output_dir}/checkpoint-{state.global_step}")


def _caller() -> transformers.Trainer:
    """Return the trainer whose constructor runs, which callbacks are not given."""
    frame = sys._getframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, transformers.Trainer):
            return caller
        frame = frame.f_back  # type: ignore[assignment]
    raise InputError("PolicyCallback is for transformers.Trainer. Fix: give it to Trainer(..., callbacks=[...])")
