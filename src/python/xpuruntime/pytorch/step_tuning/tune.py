# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`tune`: find the fastest way to run a training step whose losses stay those of the eager one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from xpuruntime.errors import InputError, XpuRuntimeError
from xpuruntime.measuring.rounds import measure, timed
from xpuruntime.measuring.statistics import CandidateCode, Margin
from xpuruntime.policies import KernelPolicy
from xpuruntime.printable import error_line, printable
from xpuruntime.pytorch.capture.api import device_of, samples_of, state_of
from xpuruntime.pytorch.capture.captured_state import StateSnapshot
from xpuruntime.pytorch.capture.captured_state import make_capturable as change
from xpuruntime.pytorch.capture.graph_key import on_device
from xpuruntime.pytorch.compiler.compile_hooks import keep_compiled
from xpuruntime.pytorch.dispatch.context import CONTEXT, active_policy
from xpuruntime.pytorch.dispatch.policy_scope import kernel_policy
from xpuruntime.pytorch.explanation.call_recorder import CallRecorder, RecordedCalls
from xpuruntime.pytorch.explanation.requested import requests_other_kernel
from xpuruntime.pytorch.step_tuning.ranks import Ranks
from xpuruntime.pytorch.step_tuning.result import (
    StepCandidate,
    StepRecord,
    TunedStep,
    decide,
    difference,
    losses_of,
    reference_losses,
    rows_of,
    words_of,
)
from xpuruntime.pytorch.step_tuning.variants import (
    EAGER,
    LAUNCHES,
    StepParts,
    Variant,
    VariantMemoryMeter,
    VariantStep,
    build,
    captures_in_torch,
    check_arguments,
    check_rank_timeout,
    obstacle,
)

if TYPE_CHECKING:
    from xpuruntime.measuring.rounds import Progress, Replacement, RoundTimes, Sampler
    from xpuruntime.pytorch.capture.captured_state import CapturedState
    from xpuruntime.pytorch.step_tuning.result import ReferenceLosses

#: The policies that are tried where none are given.
_KERNELS: dict[str, KernelPolicy | None] = {
    "native": None,
    "auto": KernelPolicy(matmul="auto", auto_strategy="best_performance"),
}


def tune(
    fn: Callable[..., Any],
    sample_inputs: Any,
    *,
    optimizer: Any = None,
    scaler: Any = None,
    before_step: Callable[[], Any] | None = None,
    modules: Sequence[Any] | None = None,
    launches: Sequence[str] | None = None,
    kernels: Mapping[str, KernelPolicy | None] | None = None,
    make_capturable: bool = False,
    rtol: float | None = None,
    min_effect: float = 0.02,
    confidence: float = 0.99,
    rounds: tuple[int, int] = (7, 61),
    budget: float = 300.0,
    cancel: Callable[[], bool] | None = None,
    progress: Callable[[Progress], None] | None = None,
    seed: int = 0,
    rank_timeout: float = 1800.0,
    cache_key: str | None = None,
) -> TunedStep:
    """Race ways to run a training step, and return the fastest whose losses are those of the eager step.

    A step can run eagerly, compiled by ``torch.compile``, captured into a CUDA graph, or compiled and captured, each
    with PyTorch's kernels and under kernel policies. Each variant first does some steps from the same state; where its
    losses differ from the eager ones, it is out, and so is a policy of which no kernel ran. Then all are timed in
    interleaved rounds against the eager step, and under a policy against the same launch without it, too: forward and
    backward of elementwise operations stay with the compiler unless the compiled step is faster by another kernel.
    Afterwards parameters, buffers, state of optimizer and scaler, and random numbers are as before.

    Parameters
    ----------
    fn, sample_inputs, optimizer, scaler, before_step, modules, make_capturable
        As of `capture_graph`. The sample inputs are those of every step that is timed.
    launches : sequence of str, optional
        Of ``"eager"``, which is always there without a policy, ``"compile"``, ``"compile:reduce-overhead"``,
        ``"compile:max-autotune-no-cudagraphs"``, ``"capture"`` and ``"capture:compile"``. Default: all.
    kernels : dict of str to KernelPolicy or None, optional
        Names to policies. Default: PyTorch's kernels, and the fastest measured ones of products.
    rtol : float, optional
        Relative difference of losses that is allowed. Default: by the type that is computed in, 1e-3 for float32 and
        2e-2 for bfloat16; and twice the spread of eager losses over seeds, where a step draws random numbers.
    min_effect : float
        The smallest gain that counts, as a share of the time of the eager step.
    confidence : float
        One minus the chance that any variant is falsely called faster.
    rounds : tuple of int
        The fewest and the most.
    budget : float
        Seconds after which no round is begun. Compiling and capturing come before, and are not in it.
    cancel : callable, optional
        Asked before every turn; where it says yes, what was decided so far counts. Only in a single process.
    progress : callable, optional
        Called after every look at the data.

    rank_timeout : float
        As of `RankAgreement`.
    cache_key : str, optional
        Name of the step, under which the result is kept for other processes beside the measured times of kernels. It
        holds for the same device, number of ranks, modules, shapes, variants, `make_capturable`, defaults of the
        optimizer and versions of all packages, and not for other code of `fn`: the eager step and the winner run,
        their losses are compared, and nothing is timed.

    Returns
    -------
    TunedStep
        The step to call, its policy, and a row for every variant.

    Raises
    ------
    InputError
        An argument is wrong, a policy is active, or ranks of a distributed step differ.
    EngineError
        Another rank failed, ended, or was silent for `rank_timeout` seconds.

    Notes
    -----
    In a distributed process group all ranks call this together: the first one decides for all, so that they do the
    same steps. A variant that fails on one rank before the race is out on all; what fails there later ends the race on
    all. Ranks run the same kernels and watch each other, as in `RankAgreement`.

    Examples
    --------
    >>> import torch, xpuruntime.pytorch as xrt_torch
    >>> model, (x, y) = torch.nn.Linear(8, 1), (torch.ones(4, 8), torch.ones(4, 1))
    >>> sgd = torch.optim.SGD(model.parameters(), 0.01)
    >>> tuned = xrt_torch.tune(
    ...     lambda x, y: (model(x) - y).square().mean(), (x, y), optimizer=sgd, launches=["eager", "capture"]
    ... )
    >>> {row.name: row.code for row in tuned.candidates}["capture"]
    'infeasible'
    >>> with tuned:
    ...     loss = tuned(x, y)
    """
    check_rank_timeout(rank_timeout)
    with Ranks(rank_timeout) as ranks:
        used, samples, device, variants = ranks.agree(
            "its arguments",
            lambda: _prepared(
                fn, sample_inputs, launches, kernels, modules,
                optimizer=optimizer, scaler=scaler, before_step=before_step, rtol=rtol, min_effect=min_effect,
                confidence=confidence, rounds=rounds, budget=budget, make_capturable=make_capturable, cancel=cancel,
                progress=progress, seed=seed, cache_key=cache_key,
            ),
        )  # fmt: skip
        ranks.check_variants({variant.name: variant.policy for variant in variants})
        if make_capturable and optimizer is not None and device.type == "cuda":
            change(optimizer, device)
        args = tuple(on_device(samples, device))
        parts = StepParts(fn, optimizer, scaler, before_step, modules, used.parameters())
        memory = VariantMemoryMeter(device) if device.type == "cuda" else None
        snapshot = StateSnapshot(used, device)
        kept = contextlib.ExitStack()
        try:
            kept.enter_context(keep_compiled())
            trials = _Trials(memory, parts, args, used, snapshot, device, ranks, rtol)
            record = None
            if cache_key is not None:
                options = {
                    "min_effect": min_effect,
                    "confidence": confidence,
                    "optimizer": type(optimizer).__qualname__,
                    "defaults": getattr(optimizer, "defaults", None),
                    "make_capturable": make_capturable,
                    "ranks": ranks.count,
                }
                record = StepRecord(cache_key, used, samples, device, variants, options)
            known = ranks.share(record.recall(budget) if record is not None and ranks.rank == 0 else None)
            decision = None if known is None else trials.run_known(variants, known)
            if decision is None:
                decision = _raced(
                    trials, ranks, variants, record, min_effect=min_effect, confidence=confidence, rounds=rounds,
                    budget=budget, cancel=cancel if ranks.count == 1 else None, progress=progress, seed=seed,
                )  # fmt: skip
            rows, winner, verdict = decision
        finally:
            kept.close()
            snapshot.restore()
            parts.forget_gradients()
    chosen = next(variant for variant in variants if variant.name == winner)
    trials.drop_graphs(winner)
    return TunedStep(
        trials.steps[winner], winner, chosen.policy, rows, verdict, trials.reference.tolerance, trials.notes,
        torch_graphs=trials.torch_graphs,
    )  # fmt: skip


def _raced(
    trials: _Trials,
    ranks: Ranks,
    variants: Sequence[Variant],
    record: StepRecord | None,
    *,
    min_effect: float,
    budget: float,
    **options: Any,
) -> tuple[list[StepCandidate], str, Any]:
    """Build, check and time all variants; return the rows, the winner's name and the verdict."""
    tried = {variant.name: trials.run(variant) for variant in sorted(variants, key=captures_in_torch)}
    pairs = pairs_of(variants, trials.samplers)
    margin = Margin(relative=min_effect, absolute=0.0)
    measured = _race(trials, ranks, pairs, margin=margin, budget=budget, **options)
    decision = None
    if ranks.rank == 0:
        decision = decide([tried[variant.name] for variant in variants], measured, min_effect)
        if record is not None and measured is not None and measured.ended != "cancelled":
            record.keep(
                decision[0], decision[1], len(measured.twin), budget, undecided=decision[2] == "undecided"
            )  # fmt: skip
    return cast("tuple[list[StepCandidate], str, Any]", ranks.share(decision))


def _prepared(
    fn: Any, sample_inputs: Any, launches: Any, kernels: Any, modules: Any, **options: Any
) -> tuple[CapturedState, Any, torch.device, list[Variant]]:
    """Return the state of a step, its samples, their device, and the variants. Raises InputError for what is wrong."""
    check_arguments(**options)
    used = state_of(fn, options["optimizer"], options["scaler"], modules)
    samples = samples_of(sample_inputs)
    device, _ = device_of(used, samples)
    variants = _variants(LAUNCHES if launches is None else launches, _KERNELS if kernels is None else kernels)
    if active_policy() is not None:
        msg = "tune: a kernel policy is active, and every variant would run under it. Fix: clear it, and pass kernels="
        raise InputError(msg)
    return used, samples, device, variants


class _Trials:
    """Builds variants and checks their losses; the first one is the eager step."""

    reference: ReferenceLosses

    def __init__(
        self,
        memory: VariantMemoryMeter | None,
        parts: StepParts,
        args: tuple[Any, ...],
        used: CapturedState,
        snapshot: StateSnapshot,
        device: torch.device,
        ranks: Ranks,
        rtol: float | None,
    ) -> None:
        self._memory = memory
        self._parts, self._args, self._used, self._snapshot = parts, args, used, snapshot
        self._device, self._ranks, self._rtol = device, ranks, rtol
        self.steps: dict[str, VariantStep] = {}
        #: Whether `torch.compile` recorded CUDA graphs: they live as long as its code.
        self.torch_graphs = False
        self.samplers: dict[str, Sampler] = {}
        self.notes: list[str] = []

    def run(self, variant: Variant) -> StepCandidate:
        """Return the row of a variant, which is ``"undecided"`` where it may be raced."""
        why = obstacle(variant, self._device)
        if why:
            return StepCandidate(variant.name, CandidateCode.INFEASIBLE, why)
        if variant.launch == EAGER and variant.policy is None:
            return self._ranks.agree("the eager step", lambda: self._restored(variant))  # type: ignore[no-any-return]
        row, failure = StepCandidate(variant.name, CandidateCode.UNDECIDED, ""), None
        try:
            row = self._restored(variant)
        except Exception as error:
            failure = printable(error_line(error, named=True))
            row = replace(
                row,
                code=CandidateCode.INFEASIBLE if isinstance(error, XpuRuntimeError) else CandidateCode.FAILED,
                reason=failure,
            )
            self._ranks.note(f"{variant.name}: {failure}")
        others = [
            outcome for outcome in self._ranks.gather((row.code, row.reason)) if outcome[0] != CandidateCode.UNDECIDED
        ]
        if others and row.code == CandidateCode.UNDECIDED:
            row = replace(row, code=others[0][0], reason=f"on another rank: {others[0][1]}")
        if row.code != CandidateCode.UNDECIDED:
            self.samplers.pop(variant.name, None)
            self.steps.pop(variant.name, None)
        return row

    def run_known(self, variants: Sequence[Variant], known: Replacement) -> tuple[list[StepCandidate], str, Any] | None:
        winner = known.chosen.kernel
        needed = {variant.name: self.run(variant) for variant in variants if variant.name in (EAGER, winner)}
        if needed[winner].code != CandidateCode.UNDECIDED:
            return None
        rows = [
            needed.get(variant.name)
            or StepCandidate(variant.name, CandidateCode.NOT_TRIED, "it was out when it was raced before")
            for variant in variants
        ]
        verdict = "winner" if winner != EAGER else "undecided" if known.undecided else "tied"
        return rows_of(known, rows), winner, verdict

    def _restored(self, variant: Variant) -> StepCandidate:
        try:
            return self._try(variant)
        finally:
            self._snapshot.restore()
            self._parts.forget_gradients()

    def _try(self, variant: Variant) -> StepCandidate:
        if self._memory is not None:
            self._memory.begin()
        refused: dict[str, str] = {}
        with _under(variant.policy), _recorded() if variant.policy is not None else contextlib.nullcontext() as calls:
            step = build(variant, self._parts, self._args)
            self.torch_graphs = self.torch_graphs or step.recorded
            if variant.name == EAGER:
                self.reference = reference_losses(step, self._args, self._used, self._snapshot, self._rtol)
                losses = self.reference.losses
                if self.reference.random:
                    self.notes.append(
                        "a step draws random numbers, so losses were compared within their spread over seeds, "
                        f"{self.reference.tolerance:.2g}"
                    )
            else:
                losses = losses_of(step, self._args)
            if (active := active_policy()) is not None:
                refused = {route.op: route.reasons for route in active.routes.values() if route.passed_over}
        apart = difference(losses, self.reference.losses)
        row = StepCandidate(variant.name, CandidateCode.UNDECIDED, "", loss_difference=apart)
        if self._memory is not None:
            row = replace(row, memory=self._memory.peak())
        if apart > self.reference.tolerance:
            reason = f"its losses differ by {apart:.2g}, and {self.reference.tolerance:.2g} is allowed"
            return replace(row, code=CandidateCode.INACCURATE, reason=reason)
        idle, served = (
            ([], 0) if calls is None or variant.policy is None else _idle(variant.policy, calls.kinds, refused)
        )
        if idle and not served:
            return replace(row, code=CandidateCode.INFEASIBLE, reason="; ".join(idle))
        self.notes += [f"{variant.name}: {sentence}" for sentence in idle]
        self.steps[variant.name] = step
        self.samplers[variant.name] = self._sampler(step, variant.policy)
        return row

    def drop_graphs(self, winner: str) -> None:
        for name, step in self.steps.items():
            if name != winner:
                step.reset()

    def _sampler(self, step: Callable[..., Any], policy: KernelPolicy | None) -> Sampler:
        finish = (lambda: torch.cuda.synchronize(self._device)) if self._device.type == "cuda" else None
        inner = timed(lambda: step(*self._args), finish)

        def turn(calls: int, samples: int) -> Sequence[float]:
            with _under(policy):
                inner(1, 1)  # what follows a change of policy, such as finding kernels or compiling, is no step's time
                return inner(calls, samples)

        return turn


@contextlib.contextmanager
def _recorded() -> Iterator[CallRecorder]:
    recorder = CallRecorder(lambda _: contextlib.nullcontext())
    before = CONTEXT.watch(recorder)
    try:
        yield recorder
    finally:
        CONTEXT.watch(before)


def _idle(policy: KernelPolicy, calls: Sequence[RecordedCalls], refused: Mapping[str, str]) -> tuple[list[str], int]:
    """Return for which operations no kernel that a policy names has served a call, and for how many one has."""
    # `refused` are operations, each with why kernels were passed over: calls that are compiled without them are not
    # seen.
    sentences, served = [], 0
    for ops, words in words_of(policy).items():
        ran = [call for call in calls if call.op in ops]
        if not any(requests_other_kernel(op, words) for op in ops):
            continue
        if any(call.status == "honoured" for call in ran):
            served += 1
            continue
        named = " or ".join(ops)
        reasons = [*(call.reason for call in ran), *(refused.get(op, "") for op in ops)]
        why = next(filter(None, reasons), f"the step has no call of {named} that it can serve")
        sentences.append(f"no call of {named} ran by {' or '.join(sorted(words))}: {why}")
    return sentences, served


def _race(trials: _Trials, ranks: Ranks, pairs: Mapping[str, str], **options: Any) -> RoundTimes | None:
    if len(trials.samplers) < 2:
        return None
    if ranks.rank != 0:
        ranks.follow(trials.samplers)
        return None
    samplers = ranks.leading(trials.samplers)
    return ranks.lead(  # type: ignore[no-any-return]
        lambda: measure(samplers, control=EAGER, pairs=pairs, statistic="mean", **options)
    )


def pairs_of(variants: Sequence[Variant], raced: Container[str]) -> dict[str, str]:
    """Return the variants under a policy that are raced, each with the same launch without one, the eager aside."""
    return {
        variant.name: variant.plain
        for variant in variants
        if variant.policy is not None and variant.name in raced and variant.plain in raced and variant.plain != EAGER
    }


def _variants(launches: Sequence[str], kernels: Mapping[str, KernelPolicy | None]) -> list[Variant]:
    listed = isinstance(launches, Iterable) and not isinstance(launches, str)
    unknown = [launch for launch in launches if launch not in LAUNCHES] if listed else []
    if not listed or unknown:
        wrong = f"has {unknown[:1]!r}" if listed else f"is {launches!r}"
        raise InputError(f"tune: launches {wrong}. Fix: give a list of {', '.join(LAUNCHES)}")
    if not isinstance(kernels, Mapping):
        raise InputError(
            f"tune: kernels is a {type(kernels).__name__}. Fix: give a dict of names to KernelPolicy or None"
        )
    for name, policy in kernels.items():
        if policy is not None and not isinstance(policy, KernelPolicy):
            msg = f"tune: kernels[{name!r}] is a {type(policy).__name__}. Fix: give a KernelPolicy, or None"
            raise InputError(msg)
    variants = [Variant(EAGER, "native", None)]
    for name, policy in kernels.items():
        variants += [Variant(launch, name, policy) for launch in LAUNCHES if launch in launches]
    return list({variant.name: variant for variant in variants}.values())


def _under(policy: KernelPolicy | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if policy is None else kernel_policy(policy)
