# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Records of tuned steps, kept beside the measured times of kernels for the versions of all that was raced."""

from __future__ import annotations

import hashlib
import json
from importlib import metadata
from typing import TYPE_CHECKING, Any

from xpuruntime.measuring.rounds import KernelTiming, Replacement
from xpuruntime.measuring.statistics import CandidateCode
from xpuruntime.ops import tuned_records
from xpuruntime.ops.plugins import facts_of_kernel
from xpuruntime.ops.torch_kernels import find_torch_kernel, is_torch_kernel
from xpuruntime.policies import TuningPolicy
from xpuruntime.policies.kernel_rules import ARRAY_OPS, FAMILIES, computed_by, ops_of
from xpuruntime.pytorch._private_api import pytree
from xpuruntime.pytorch.dispatch.tuning import device_name, held_by
from xpuruntime.pytorch.step_tuning.result import StepCandidate

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from xpuruntime.policies import KernelPolicy
    from xpuruntime.pytorch.capture.captured_state import CapturedState
    from xpuruntime.pytorch.step_tuning.variants import Variant

__all__ = ["StepRecord", "rows_of", "words_of"]


class StepRecord:
    """Where the result of one race is kept: by the name of the step, and by what it runs on and with."""

    def __init__(
        self,
        name: str,
        used: CapturedState,
        samples: Any,
        device: torch.device,
        variants: Sequence[Variant],
        options: dict[str, Any],
    ) -> None:
        facts = {
            "parameters": [
                f"{list(parameter.shape)}{parameter.dtype}{parameter.requires_grad}" for parameter in used.parameters()
            ],
            "modules": [f"{type(module).__module__}.{type(module).__qualname__}" for module in used.all_modules()],
            "inputs": [_shown(leaf) for leaf in pytree.tree_leaves(samples)],
            "variants": {variant.name: variant.policy.to_plain() if variant.policy else None for variant in variants},
            **options,
        }
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]
        self._key = f"step;{name};{device_name(device)};{digest}"
        policies = [variant.policy for variant in variants if variant.policy is not None]
        self._held_by = _versions(policies, device) | _packages(used)

    def recall(self, budget: float) -> Replacement | None:
        """Return what was raced before, as far as it still holds."""
        return tuned_records.recall(self._key, self._held_by, TuningPolicy(budget=budget))

    def keep(self, rows: Sequence[StepCandidate], winner: str, rounds: int, budget: float, *, undecided: bool) -> None:
        """Keep the rows that were timed, that of the winner first."""
        timed = sorted((row for row in rows if row.seconds), key=lambda row: row.name != winner)
        times = tuple(
            KernelTiming(row.name, "", (row.seconds or 0.0) * 1e6, *(row.ratio or (1.0, 1.0, 1.0)), str(row.code))
            for row in timed
        )
        if times:
            tuned_records.keep(self._key, self._held_by, Replacement(times, rounds, budget, undecided))


def rows_of(record: Replacement, rows: Sequence[StepCandidate]) -> list[StepCandidate]:
    """Return rows of which some were timed before, in another process."""
    known = {candidate.kernel: candidate for candidate in record.candidates}
    return [
        StepCandidate(
            row.name, CandidateCode(known[row.name].verdict), "as it was raced before, with the same versions",
            known[row.name].microseconds * 1e-6,
            None if index == 0 else (known[row.name].ratio, known[row.name].low, known[row.name].high),
            None, row.memory, row.loss_difference,
        )
        if row.name in known else row
        for index, row in enumerate(rows)
    ]  # fmt: skip


def _versions(policies: Sequence[KernelPolicy], device: torch.device) -> dict[str, str]:
    """Return what the times of kernels hold for that policies name or leave to measured times."""
    versions = held_by("", device.type)
    named = (pair for policy in policies for pair in words_of(policy).items())
    for op, word in sorted({(op, word) for ops, words in named for op in ops for word in words}):
        if word == "auto":
            versions |= held_by(op, device.type)
        kernel = find_torch_kernel(word, op) if is_torch_kernel(word) else None
        if kernel is not None:
            versions[kernel.id] = " ".join(f"{name}={value}" for name, value in facts_of_kernel(kernel).items())
    return versions


def words_of(policy: KernelPolicy) -> dict[tuple[str, ...], set[str]]:
    """Return the operations of which a policy or a rule of it names kernels, with these names.

    A rule that states no operation is for those of its kernels together.
    """
    words: dict[tuple[str, ...], set[str]] = {}
    stated: list[Any] = [((op,), policy.get(op)) for op in FAMILIES]
    for rule in policy.compiled_rules.rules:
        of_kernels = ops_of(rule.use) if "auto" in rule.use else computed_by(rule.use) or ARRAY_OPS
        stated.append(((rule.rule.match.op,) if rule.rule.match.op else tuple(sorted(of_kernels)), rule.use))
    for ops, use in stated:
        if use:
            words.setdefault(ops, set()).update((use,) if isinstance(use, str) else use)
    return words


def _packages(used: CapturedState) -> dict[str, str]:
    """Return the versions of the packages that define the modules of a step."""
    tops = {type(module).__module__.partition(".")[0] for module in used.all_modules()}
    owners = metadata.packages_distributions()
    names = sorted({name for top in tops for name in owners.get(top, ())})
    return {f"package {name}": metadata.version(name) for name in names}


def _shown(value: Any) -> str:
    return f"{list(value.shape)}{value.dtype}" if hasattr(value, "dtype") else repr(value)
