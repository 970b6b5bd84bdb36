# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Space of a search: combinations of changes, whether a plan takes them, and the state of each candidate."""

from __future__ import annotations

import hashlib
import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from xpuruntime.engines.base import Tunable
from xpuruntime.engines.quantization import uses_calibration
from xpuruntime.errors import PolicyError, XpuRuntimeError
from xpuruntime.files.paths import json_bytes
from xpuruntime.inference.plan_request import plan_request
from xpuruntime.measuring.statistics import CandidateCode, Interval
from xpuruntime.tuning.trial import Candidate, Trial
from xpuruntime.tuning.tune_result import CandidateResult, Ratio

if TYPE_CHECKING:
    from xpuruntime.engines.registry import EngineRegistry
    from xpuruntime.planning import Plan, PlanRequest
    from xpuruntime.policies import Policy
    from xpuruntime.runtime.cpu_and_memory import CpuCores
    from xpuruntime.runtime.machine import Machine
    from xpuruntime.tuning.spec.parts import SearchSpace
    from xpuruntime.tuning.spec.tune_spec import TuneSpec

_ENGINE, _DEVICE, _PRECISION, _THREADS = (f"execution.{key}" for key in ("engine", "device", "precision", "threads"))
_GRAPH = "execution.cuda_graph"
#: What the keys of options of engines begin with.
OPTIONS = "execution.provider_options."
#: The key of the rows of one run, which is none of a policy.
BATCH = "batch"
#: Values that are the same as leaving the key out.
_UNSTATED: dict[str, Any] = {_PRECISION: "model", _GRAPH: "off", "execution.layout": "auto"}


class Setting(NamedTuple):
    """One value of one key of one engine."""

    engine: str
    key: str
    value: Any


class Point(NamedTuple):
    """An engine, the settings away from the first value of their keys, and all keys that the point states."""

    engine: str
    settings: tuple[Setting, ...]
    changes: dict[str, Any]


class Space(NamedTuple):
    """Engines with their tunable settings, the device, and what was left out of the search and why."""

    device: str
    tunables: dict[str, tuple[Tunable, ...]]
    notes: tuple[str, ...]

    def wave(self, size: int, barred: frozenset[Setting] = frozenset()) -> Iterator[Point]:
        """Yield the points with `size` settings away from the first values, without those that are barred."""
        for engine, tunables in self.tunables.items():
            first = {tunable.key: tunable.values[0] for tunable in tunables}
            for keys in itertools.combinations(tunables, size):
                for values in itertools.product(*(key.values[1:] for key in keys)):
                    settings = tuple(Setting(engine, key.key, value) for key, value in zip(keys, values, strict=True))
                    stated = {**first, **{setting.key: setting.value for setting in settings}}
                    if barred.isdisjoint(settings) and _needed(keys, stated):
                        yield Point(engine, settings, self._changes(engine, stated))

    def point(self, engine: str, settings: Sequence[Setting]) -> Point | None:
        """Return the point with these settings away from the first values; ``None`` where one would have no effect."""
        tunables = {tunable.key: tunable for tunable in self.tunables[engine]}
        stated = {
            **{key: tunable.values[0] for key, tunable in tunables.items()},
            **{setting.key: setting.value for setting in settings},
        }
        keys = [tunables[setting.key] for setting in settings]
        return Point(engine, tuple(settings), self._changes(engine, stated)) if _needed(keys, stated) else None

    def neighbours(self, point: Point) -> Iterator[Point]:
        """Yield the points that differ from one in the value of one key."""
        for tunable in self.tunables[point.engine]:
            others = tuple(setting for setting in point.settings if setting.key != tunable.key)
            if len(others) < len(point.settings) and (neighbour := self.point(point.engine, others)) is not None:
                yield neighbour
            for value in tunable.values[1:]:
                setting = Setting(point.engine, tunable.key, value)
                if setting not in point.settings:
                    neighbour = self.point(point.engine, (*others, setting))
                    if neighbour is not None:
                        yield neighbour

    def size(self) -> int:
        """Return the number of all points, without regard to what depends on what."""
        total = 0
        for tunables in self.tunables.values():
            product = 1
            for tunable in tunables:
                product *= len(tunable.values)
            total += product
        return total

    @property
    def waves(self) -> int:
        """The number of waves."""
        return 1 + max((len(tunables) for tunables in self.tunables.values()), default=0)

    def _changes(self, engine: str, stated: Mapping[str, Any]) -> dict[str, Any]:
        kept = {key: value for key, value in stated.items() if value is not None and _UNSTATED.get(key) != value}
        return {_ENGINE: engine, _DEVICE: self.device, **kept}


def build_space(
    base: Policy,
    wanted: SearchSpace,
    declared: Mapping[str, Sequence[Tunable]],
    *,
    device: str,
    cores: CpuCores,
    accuracy: bool,
    graphs: bool = True,
    batch: int = 1,
) -> Space:
    """Return the space."""
    stated, notes = base.stated(), []
    fixed = {key for key in stated if key not in (_ENGINE, _DEVICE)}
    replaced: dict[str, tuple[Any, ...]] = {}
    for name in ("precision", "cuda_graph", "layout", "threads"):
        key, values = f"execution.{name}", getattr(wanted, name)
        if values and key in fixed:
            msg = f"space.{name} searches {key}, which the base policy fixes. Fix: leave it out of one of them"
            raise PolicyError(msg)
        if values:
            replaced[key] = tuple(_threads(values, cores)) if name == "threads" else values
    if wanted.batch:
        replaced[BATCH] = (None, *(rows for rows in wanted.batch if rows != batch))
    for engine in wanted.options:
        if engine not in declared:
            msg = f"space.options.{engine}: this engine is not searched; the search has {', '.join(declared) or 'none'}"
            raise PolicyError(msg)
    if _PRECISION not in replaced and not accuracy and _PRECISION not in fixed:
        replaced[_PRECISION] = ("model",)
        notes.append(
            "the precision was not searched: state constraints.accuracy or space.precision to allow other precisions"
        )
    searched = {tunable.key for tunables in declared.values() for tunable in tunables}
    if not graphs and _GRAPH in searched and _GRAPH not in fixed:
        replaced[_GRAPH] = ("off",)
        notes.append(
            "CUDA graphs were not searched, because plain runs use none; objective.call: bind (--call bind) has bound "
            "runs timed"
        )
    space = {}
    for engine, tunables in declared.items():
        options = wanted.options.get(engine)
        mine = [*tunables, *(Tunable(key=key, values=()) for key in replaced)]
        if options is not None:
            mine = [tunable for tunable in mine if not tunable.key.startswith(OPTIONS)]
            mine += [
                Tunable(key=f"{OPTIONS}{engine}.{name}", values=(None, *values)) for name, values in options.items()
            ]
        space[engine] = tuple(_settled(mine, fixed, replaced))
    return Space(device, space, tuple(notes))


def _settled(
    tunables: Sequence[Tunable], fixed: set[str], replaced: Mapping[str, tuple[Any, ...]]
) -> Iterator[Tunable]:
    seen = set(fixed)
    for tunable in tunables:
        values = tuple(dict.fromkeys(replaced.get(tunable.key, tunable.values)))
        if tunable.key not in seen and values and not (len(values) == 1 and _UNSTATED.get(tunable.key) == values[0]):
            seen.add(tunable.key)
            yield Tunable(key=tunable.key, values=values, needs=tunable.needs, first=tunable.first)


def _threads(values: Sequence[Any], cores: CpuCores) -> Iterator[Any]:
    words = {"engine": None, "physical": cores.physical, "logical": cores.logical}
    return (words.get(value, value) for value in values)


def _needed(keys: Sequence[Tunable], stated: Mapping[str, Any]) -> bool:
    return all(stated.get(key) in values for tunable in keys for key, values in tunable.needs.items())


def kernel_values(wanted: SearchSpace, families: Mapping[str, Iterable[str]]) -> dict[str, tuple[str, ...]]:
    """Return the kernels to try by operation: those that are stated, or all families of each operation.

    All families come with ``auto_strategy``, by which an engine measures the kernels of each operation of a model.
    """
    if wanted.kernels == "off":
        return {}
    if wanted.kernels == "auto":
        named = {op: tuple(name for name in names if name != "auto") for op, names in families.items()}
        return {"auto_strategy": ("best_performance",), **named}
    return {op: tuple(values) for op in families if (values := getattr(wanted.kernels, op)) is not None}


def apply_changes(base: Policy, changes: Mapping[str, Any]) -> Policy:
    """Return a policy with keys changed: those of ``execution``, ``execution.provider_options`` and ``kernels``.

    The batch is of the runs, and changes no policy.
    """
    execution: dict[str, Any] = {}
    options = {engine: dict(provider_option) for engine, provider_option in base.execution.provider_options.items()}
    kernels: dict[str, Any] = {}
    for key, value in changes.items():
        if key == BATCH:
            continue
        section, _, name = key.partition(".")
        if key.startswith(OPTIONS):
            engine, _, option = key.removeprefix(OPTIONS).partition(".")
            options.setdefault(engine, {})[option] = value
        elif section == "kernels":
            kernels[name] = value
        else:
            execution[name] = value
    changed = base.execution.replace(**{**execution, "provider_options": options})
    return base.replace(execution=changed, kernels=base.kernels.replace(**kernels))


class Planned(NamedTuple):
    """A plan that was accepted: who runs it, its policy, and a digest of what the engine gets."""

    engine: str
    device: str
    policy: Policy
    settings_digest: str
    computes: str | None


class Rejected(NamedTuple):
    """Why no plan takes the keys."""

    reason: str


class Planner:
    """Plans changes of a base policy; `most_threads` are those of the cores that candidates have."""

    def __init__(
        self,
        request: PlanRequest,
        base: Policy,
        registry: EngineRegistry,
        machine: Machine | None,
        *,
        most_threads: int | None,
    ) -> None:
        self._request, self._base, self._most = request, base, most_threads
        self._registry, self._machine = registry, machine

    def plan(self, changes: Mapping[str, Any]) -> Planned | Rejected:
        """Plan the base policy with these keys changed.

        A key that the engine does not enforce is rejected: a candidate that gets less than it states would be measured
        as something else than it is.
        """
        try:
            policy = apply_changes(self._base, changes)
            threads = policy.execution.threads
            if self._most is not None and threads is not None and threads > self._most:
                return Rejected(f"execution.threads: {threads} are more than the device has, which is {self._most}")
            request = self._request
            if not uses_calibration(policy, request.model):
                policy = policy.replace(calibration=None)
                request = msgspec.structs.replace(request, calibration=None)
            (plan, _), _ = plan_request(request, policy, self._registry, self._machine)
        except XpuRuntimeError as error:
            return Rejected(_reason(error))
        for key in changes:
            control = plan.control(key)
            if control is not None and control.enforceability == "unsupported":
                return Rejected(f"{key}: {control.reason}")
            if control is not None and key.startswith("kernels.") and control.resolved == "-":
                return Rejected(f"{key}: {control.reason}")
        digest = _settings_digest(plan, policy, changes.get(BATCH))
        return Planned(plan.engine, plan.device, policy, digest, plan.settings.get("computes"))


def _settings_digest(plan: Plan, policy: Policy, batch: int | None) -> str:
    """Return a digest of what the engine gets: the batch, and its settings or, without any, all of ``execution``."""
    settings = plan.settings or policy.execution.to_plain()
    text = json_bytes((plan.engine, plan.device, settings, plan.kernels, batch), enc_hook=str, order="deterministic")
    return hashlib.sha256(text).hexdigest()


def _reason(error: XpuRuntimeError) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[1:] or lines)[:500]


#: Codes of candidates that may be finalists: those that ran, and were not proven to be slower than the control.
FINAL = (CandidateCode.UNDECIDED, CandidateCode.BEATEN, CandidateCode.SLOWER, CandidateCode.NOT_FASTER)

#: Words in operator types by operation.
_WORDS = {
    "matmul": ("matmul", "gemm", "fullyconnected", "linear", "addmm"),
    "conv": ("conv",),
    "attention": ("attention", "sdpa", "softmax"),  # written out, it has a Softmax between two products
    "layer_norm": ("layernorm", "layer_norm", "mvn"),
    "rms_norm": ("rmsnorm", "simplifiedlayernorm", "rms_norm"),
}


class CandidateState:
    """Code, reason, figures and gain of one candidate; changes as the search goes on."""

    def __init__(self, candidate: Candidate, code: CandidateCode = CandidateCode.UNDECIDED, reason: str = "") -> None:
        self.candidate, self.code, self.reason = candidate, code, reason
        self.trial = Trial()
        self.figures: list[float] = []
        self.gain: Ratio | None = None
        #: Where it was opened at last.
        self.device: str | None = None
        #: Whether it was tried when nothing led, in time that was kept back for the decision.
        self.late = False
        #: Estimated ratio of its figure to that of the control.
        self.estimate: float | None = None

    @property
    def trial_key(self) -> str:
        """What its trial is called in the journal. One that is late is not taken for one in time when it is resumed."""
        return f"trial/{self.candidate.id}" + ("/late" if self.late else "")

    def result(self) -> CandidateResult:
        """Return it as a record."""
        candidate, trial = self.candidate, self.trial
        return CandidateResult(
            id=candidate.id, engine=candidate.engine, device=self.device or candidate.device,
            changes=candidate.changes, code=self.code, reason=self.reason,
            figure=statistics.median(self.figures) if self.figures else None, gain=self.gain,
            start=trial.start, memory=trial.memory, error=trial.error, cosine=trial.cosine,
            cuda_graph=trial.graph,
        )  # fmt: skip


def op_share(op: str, shares: Mapping[str, float]) -> float:
    """Return the share of time of an operation, from those of operator types; ``auto_strategy`` is about all."""
    if op == "auto_strategy":
        return 1.0
    words = _WORDS.get(op, (op,))
    return sum(share for name, share in shares.items() if any(word in name.lower() for word in words))


def gain_from_ratio(ratio: Interval | None, against: str, rounds: int) -> Ratio | None:
    """Return how many times better: the inverse of the ratio of figures."""
    if ratio is None:
        return None
    return Ratio(value=1 / ratio.ratio, low=1 / ratio.high, high=1 / ratio.low, against=against, rounds=rounds)


def exit_text(code: CandidateCode, against: str, ratio: Interval | None, spec: TuneSpec) -> str:
    """Say how a candidate left a race."""
    shown = "" if ratio is None else f": {gain_from_ratio(ratio, against, 0)}"
    if code == CandidateCode.BEATEN:
        return f"{against} is better{shown}"
    if code == CandidateCode.SLOWER:
        return f"worse than {against}{shown}"
    return f"not better than {against} by {spec.decide.min_effect:.3g}{shown}"
