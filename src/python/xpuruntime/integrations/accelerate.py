# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`training_policy`: a policy for a training loop of accelerate."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from xpuruntime.integrations.training import TrainingPolicy, lock_in

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

    from xpuruntime.integrations.training import PolicyLike


@contextlib.contextmanager
def training_policy(
    accelerator: Accelerator, model: torch.nn.Module, policy: PolicyLike | None = None, *, evidence_step: int = 2
) -> Iterator[TrainingPolicy]:
    """Train under a policy in a ``with`` block around the loop; the policy is left with the block.

    ``accelerator.log`` gets the metrics. Inside of the block, ``accelerator.save_state`` writes lock and evidence into
    the checkpoint, and ``accelerator.load_state`` verifies the lock there and goes on under it.

    Parameters
    ----------
    accelerator : accelerate.Accelerator
    model : torch.nn.Module
        As ``accelerator.prepare`` returned it, or before.
    policy, evidence_step
        As for `xpuruntime.integrations.training.TrainingPolicy`, which is what ``as`` gives.
    """

    def log(run: TrainingPolicy) -> None:
        accelerator.log({f"xpuruntime/{name}": value for name, value in run.metrics.items()}, step=run.step)

    def save(_models: Any, _weights: Any, folder: str) -> None:
        if accelerator.is_main_process:
            run.save(folder)

    def load(_models: Any, folder: str) -> None:
        if lock := lock_in(folder):
            run.resume(lock)

    run = TrainingPolicy(policy, accelerator.unwrap_model(model), evidence_step=evidence_step, on_evidence=log)
    with contextlib.ExitStack() as hooks, run:
        hooks.callback(accelerator.register_save_state_pre_hook(save).remove)
        hooks.callback(accelerator.register_load_state_pre_hook(load).remove)
        yield run
