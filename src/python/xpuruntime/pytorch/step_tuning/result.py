# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Records of tuned steps, kept beside the measured times of kernels for the versions of all that was raced."""

from __future__ import annotations

import gc
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import torch

from xpuruntime.errors import InputError
from xpuruntime.evidence.tolerances import LOSS_TOLERANCES
from xpuruntime.measuring.rounds import KernelTiming, Replacement
from xpuruntime.measuring.statistics import CandidateCode, RatioVerdict
from xpuruntime.notebook import one_line
from xpuruntime.ops import tuned_records
from xpuruntime.ops.plugins import facts_of_kernel
from xpuruntime.ops.torch_kernels import find_torch_kernel, is_torch_kernel
from xpuruntime.policies import TuningPolicy
from xpuruntime.policies.kernel_rules import ARRAY_OPS, FAMILIES, computed_by, ops_of
from xpuruntime.printable import bytes_text, printable
from xpuruntime.pytorch._private_api import pytree
from xpuruntime.pytorch.dispatch.policy_scope import kernel_policy
from xpuruntime.pytorch.dispatch.tuning import device_name, held_by
from xpuruntime.pytorch.explanation.explain import explain
from xpuruntime.pytorch.step_tuning.variants import EAGER, VariantStep
from xpuruntime.pytorch.training_lock import lock as lock_of

if TYPE_CHECKING:
    import os

    from xpuruntime.lockfile.records import Lock
    from xpuruntime.measuring.rounds import RoundTimes
    from xpuruntime.measuring.statistics import RatioComparison
    from xpuruntime.policies import KernelPolicy
    from xpuruntime.pytorch.capture.captured_state import CapturedState, StateSnapshot
    from xpuruntime.pytorch.step_tuning.variants import Variant


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
    tops = {type(module).__module__.partition(".")[0] for module in used.all_modules()}
    owners = metadata.packages_distributions()
    names = sorted({name for top in tops for name in owners.get(top, ())})
    return {f"package {name}": metadata.version(name) for name in names}


def _shown(value: Any) -> str:
    return f"{list(value.shape)}{value.dtype}" if hasattr(value, "dtype") else repr(value)


#: Steps whose losses are compared, and eager repetitions with other random numbers where a step draws some.
_STEPS, _REPEATS = 4, 4


class ReferenceLosses(NamedTuple):
    """What other variants are compared with."""

    losses: tuple[float, ...]
    tolerance: float
    random: bool


def losses_of(step: Callable[..., Any], args: tuple[Any, ...]) -> tuple[float, ...]:
    """Return the first numbers that some steps return."""
    return tuple(_number(step(*args)) for _ in range(_STEPS))


def reference_losses(
    step: Callable[..., Any], args: tuple[Any, ...], used: CapturedState, snapshot: StateSnapshot, rtol: float | None
) -> ReferenceLosses:
    """Return the losses of the eager step, and the tolerance that they allow."""
    before = _random_states()
    losses, types = _losses_and_types(step, args)
    random = any(not torch.equal(a, b) for a, b in zip(before, _random_states(), strict=True))
    snapshot.restore()
    if rtol is not None:
        return ReferenceLosses(losses, rtol, random)
    tolerance = _tolerance(types | {parameter.dtype for parameter in used.parameters()})
    if random:
        apart = 0.0
        for seed in range(_REPEATS):
            torch.manual_seed(seed)
            apart = max(apart, difference(losses_of(step, args), losses))
            snapshot.restore()
        tolerance = max(tolerance, 2 * apart)
    return ReferenceLosses(losses, tolerance, random)


def difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Return the largest relative difference; infinite where one is not a number."""
    difference = 0.0
    for loss, expected in zip(losses, reference, strict=True):
        if not math.isfinite(loss) and not (math.isnan(loss) and math.isnan(expected)) and loss != expected:
            return math.inf
        if math.isfinite(loss):
            difference = max(difference, abs(loss - expected) / max(abs(expected), 1e-12))
    return difference


def _number(result: Any) -> float:
    tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    return float(tensors[0].detach().float().mean()) if tensors else math.nan


def _random_states() -> list[torch.Tensor]:
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]


def _losses_and_types(step: Callable[..., Any], args: tuple[Any, ...]) -> tuple[tuple[float, ...], set[torch.dtype]]:
    types: set[torch.dtype] = set()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        types.add(tensor.dtype)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        return losses_of(step, args), types


def _tolerance(types: set[torch.dtype]) -> float:
    names = {str(dtype).removeprefix("torch.") for dtype in types}
    return max((LOSS_TOLERANCES[name] for name in names & LOSS_TOLERANCES.keys()), default=LOSS_TOLERANCES["float32"])


@dataclass(frozen=True)
class StepCandidate:
    """One variant and its result.

    Attributes
    ----------
    name : str
        How the step is launched, and the name of the policy where there is one: ``"capture:compile+auto"``.
    code : CandidateCode
        ``"control"`` is the eager step.
    reason : str
        One sentence.
    seconds : float or None
        Median of one step.
    ratio : tuple of float or None
        Time over that of the eager step, with the ends of its interval.
    launch_ratio : tuple of float or None
        Under a policy, time over that of the same launch without one, with the ends of its interval.
    memory : int or None
        Most bytes that the step needs of the device's allocator, with what was there before; ``None`` where that was
        not observed.
    loss_difference : float or None
        Largest relative difference to the losses of the eager steps.
    """

    name: str
    code: CandidateCode
    reason: str
    seconds: float | None = None
    ratio: tuple[float, float, float] | None = None
    launch_ratio: tuple[float, float, float] | None = None
    memory: int | None = None
    loss_difference: float | None = None


def decide(
    rows: Sequence[StepCandidate], measured: RoundTimes | None, min_effect: float
) -> tuple[list[StepCandidate], str, Any]:
    """Return the rows with their figures and codes, the winner's name, and the verdict.

    Under a policy a variant can win that is faster than the eager step, and than the same launch without the policy.
    """
    decided_rows = list(rows)
    decided_rows[0] = replace(decided_rows[0], code=CandidateCode.CONTROL, reason="the step as it is")
    if measured is None:
        return decided_rows, EAGER, "tied"
    seconds = {name: sorted(times)[len(times) // 2] for name, times in measured.rounds.items() if times}
    faster = {
        name: comparison
        for name, comparison in measured.comparisons.items()
        if comparison.verdict is RatioVerdict.FASTER
        and (name not in measured.paired or measured.paired[name].verdict is RatioVerdict.FASTER)
    }
    winner = min(faster, key=lambda name: faster[name].ratio, default=EAGER)
    for index, row in enumerate(decided_rows):
        if row.name not in seconds:
            if row.code == CandidateCode.UNDECIDED:
                decided_rows[index] = replace(row, reason="cancelled before its first round was timed")
            continue
        row = replace(row, seconds=seconds[row.name])
        comparison = measured.comparisons.get(row.name)
        if comparison is not None:
            row = replace(row, ratio=(comparison.ratio, comparison.low, comparison.high))
            pair = measured.paired.get(row.name)
            if pair is not None:
                row = replace(row, launch_ratio=(pair.ratio, pair.low, pair.high))
            if row.name == winner:
                row = replace(row, code=CandidateCode.WINNER, reason=f"the fastest of {len(seconds)}")
            elif row.name in faster:
                row = replace(row, code=CandidateCode.BEATEN, reason=f"faster than eager, and {winner} is faster still")
            else:
                beside, control = (comparison, "the eager step")
                if comparison.verdict is RatioVerdict.FASTER and pair is not None:
                    beside, control = (pair, f"{row.name.partition('+')[0]} without the policy")
                row = _not_faster(row, beside, control, min_effect)
        decided_rows[index] = row
    if winner != EAGER:
        return decided_rows, winner, "winner"
    open_ = any(row.code == CandidateCode.UNDECIDED for row in decided_rows)
    return decided_rows, EAGER, "undecided" if open_ else "tied"


def _not_faster(row: StepCandidate, comparison: RatioComparison, control: str, min_effect: float) -> StepCandidate:
    ratio = f"{comparison.ratio:.3f} [{comparison.low:.3f}, {comparison.high:.3f}] of its time"
    if comparison.verdict is RatioVerdict.SLOWER:
        return replace(row, code=CandidateCode.SLOWER, reason=f"slower than {control}, {ratio}")
    if comparison.within_limit and comparison.low > 1 - min_effect:
        why = f"not faster than {control} by a share of {min_effect:g}, {ratio}"
        return replace(row, code=CandidateCode.NOT_FASTER, reason=why)
    noise = "; the machine is too noisy" if comparison.too_noisy else ""
    return replace(row, reason=f"undecided beside {control} after {comparison.rounds} rounds{noise}")


class TunedStep:
    """The variant of a step that won. Made by `tune`; call it as the step: ``loss = tuned(*batch)``.

    Where `policy` is not ``None``, it is called inside of ``with tuned:``, which activates the policy.

    Attributes
    ----------
    name : str
        Of the variant.
    policy : KernelPolicy or None
    candidates : tuple of StepCandidate
        All of them, the eager step first.
    verdict : {"winner", "tied", "undecided"}
        ``"tied"``: nothing is faster than the eager step by the smallest gain that counts.
    tolerance : float
        Relative difference of losses that was allowed.
    notes : tuple of str
    """

    def __init__(
        self,
        step: Callable[..., Any],
        name: str,
        policy: KernelPolicy | None,
        candidates: Sequence[StepCandidate],
        verdict: Literal["winner", "tied", "undecided"],
        tolerance: float,
        notes: Sequence[str],
        *,
        torch_graphs: bool = False,
    ) -> None:
        self._step, self._torch_graphs = step, torch_graphs
        self.name, self.policy, self.verdict = name, policy, verdict
        self.candidates = tuple(candidates)
        self.tolerance, self.notes = tolerance, tuple(notes)
        self._scope: kernel_policy | None = None

    def __call__(self, *args: Any) -> Any:
        """Do one step on a batch."""
        if self.policy is not None and self._scope is None:
            msg = (
                f"the step {self.name} runs under a kernel policy that is not active. "
                "Fix: write `with tuned:` around the training loop"
            )
            raise InputError(msg)
        return self._step(*args)

    def __enter__(self) -> Self:
        if self.policy is not None:
            scope = kernel_policy(self.policy)
            scope.__enter__()
            self._scope = scope
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        scope, self._scope = self._scope, None
        if scope is not None:
            scope.__exit__(kind, error, trace)

    def reset(self) -> None:
        """Drop all CUDA graphs that the search and the step have captured; the next call captures anew.

        Call it before ``torch.distributed.destroy_process_group``: NCCL waits, without an end, for graphs that hold its
        operations. Graphs that ``torch.compile`` recorded (mode ``reduce-overhead``) are dropped by
        ``torch.compiler.reset``, after which all compiled functions of the process compile again when they are called.
        """
        if isinstance(self._step, VariantStep):
            self._step.reset()
        if self._torch_graphs:
            torch.compiler.reset()
        gc.collect()

    def lock(self, path: str | os.PathLike[str], *args: Any, note: str = "") -> Lock:
        """Do one step on a batch, and lock the kernels that it ran; see `xpuruntime.pytorch.lock`.

        Raises
        ------
        InputError
            The variant has no policy: PyTorch chooses its kernels, and there is none to lock.
        """
        if self.policy is None:
            msg = (
                f"the step {self.name} runs PyTorch's own kernels, so there is none to lock. Fix: lock a step that "
                "runs under a policy"
            )
            raise InputError(msg)
        with explain() as explanation:
            self(*args)
        return lock_of(explanation, path, note=note)

    @property
    def headline(self) -> str:
        """One line: the winner with its ratio, or that nothing is faster."""
        row = next(candidate for candidate in self.candidates if candidate.name == self.name)
        if self.verdict == "winner" and row.ratio is not None:
            ratio, low, high = row.ratio
            return f"{self.name}: {1 / ratio:.2f}x [{1 / high:.2f}, {1 / low:.2f}] faster than eager"
        return f"{self.verdict}: the step stays eager"

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                row.name,
                row.code,
                "" if row.seconds is None else f"{row.seconds * 1e3:.3f} ms",
                "" if row.memory is None else bytes_text(row.memory),
                row.reason,
            )
            for row in self.candidates
        ]

    def __str__(self) -> str:
        lines = [
            f"  {name:<40} {code:<11} {time:>12} {size:>10}  {why}" for name, code, time, size, why in self._rows()
        ]
        return printable("\n".join([self.headline, *lines, *(f"  note: {note}" for note in self.notes)]))

    __repr__ = one_line

    def _repr_html_(self) -> str:
        from xpuruntime.notebook import fragment, fragment_lines, fragment_table

        table = fragment_table("variants", ("variant", "result", ">time", ">memory", "reason"), self._rows())
        return fragment([fragment_lines([self.headline]), table, fragment_lines(self.notes)])
