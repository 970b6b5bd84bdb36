# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`training_policy`: a policy for the training function of Ray Train, in each worker."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from xpuruntime.integrations import needs
from xpuruntime.integrations.training import TrainingPolicy, lock_in

with needs("Ray Train", "pip install 'ray[train]'"):
    import ray.train

if TYPE_CHECKING:
    import torch

    from xpuruntime.integrations.training import PolicyLike


@contextlib.contextmanager
def training_policy(
    model: torch.nn.Module, policy: PolicyLike | None = None, *, evidence_step: int = 2
) -> Iterator[TrainingPolicy]:
    """Train under a policy in a ``with`` block around a worker's loop; the policy is left with the block.

    The kernels of the workers are compared. Report ``run.metrics`` with your own, and write the lock into your
    checkpoint with ``run.save(folder)``; where Ray gives the worker a checkpoint with a lock, it has to hold, and the
    training goes on under it.

    Parameters
    ----------
    model : torch.nn.Module
        Before or after ``ray.train.torch.prepare_model``.
    policy, evidence_step
        As for `xpuruntime.integrations.training.TrainingPolicy`, which is what ``as`` gives.
    """
    run = TrainingPolicy(policy, model, evidence_step=evidence_step)
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            if lock := lock_in(folder):
                run.resume(lock)
    with run:
        yield run
