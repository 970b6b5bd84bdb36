# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Candidates of planning: the pairs of engine and device that a policy allows, and why none of them runs a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from xpuruntime.engines.base import Engine, Request, judge
from xpuruntime.engines.control_builder import ENGINE_CHOICE, show
from xpuruntime.errors import (
    CudaError,
    EngineError,
    EngineUnavailable,
    PolicyError,
    UnsupportedOperationError,
    XpuRuntimeError,
)
from xpuruntime.evidence.records import Control, Verdict, VerdictCode
from xpuruntime.policies.call_facts import NameSet
from xpuruntime.policies.document import nearest, question
from xpuruntime.runtime.packages import guarded, reinstall_command

if TYPE_CHECKING:
    from xpuruntime.planning.plan import PlanRequest
    from xpuruntime.policies import KernelPolicy, Policy
    from xpuruntime.runtime.machine import Machine

#: Engines a policy may name without an adapter being registered, and the extra that installs the vendor's package.
KNOWN_EXTRAS = {name: name for name in ("tensorrt", "tensorrt-rtx", "openvino", "qnn", "torch")}


class EngineCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """One pair to be judged."""

    engine: str
    device: str
    known: bool = True
    fallback: bool = False

    def __str__(self) -> str:
        """Return ``"engine@device"``."""
        return f"{self.engine}@{self.device}"


def devices_of(engine: Engine, machine: Machine) -> tuple[str, ...]:
    """Return the devices that an engine offers; none where a plugin fails to say, as its `judge` then reports."""
    return guarded(engine, lambda: tuple(map(str, engine.devices(machine))), lambda _: ())


def find_engine(name: str, engines: Mapping[str, Engine]) -> str | None:
    """Return the registered name for a name or an alias, or ``None``."""
    if name in engines:
        return name
    return next((key for key, engine in engines.items() if name == engine.name or name in engine.aliases), None)


def nearest_engine(name: str, engines: Mapping[str, Engine]) -> str | None:
    """Return the engine that an unknown name was probably meant to be, or ``None``."""
    words = {word: word for word in KNOWN_EXTRAS}
    words.update({word: key for key, engine in engines.items() for word in (key, *engine.aliases)})
    near = nearest(name, words)
    return None if near is None else words[near]


def list_candidates(
    policy: Policy, machine: Machine, engines: Mapping[str, Engine], model_format: str = "onnx"
) -> tuple[EngineCandidate, ...]:
    """List what may run, in order and without repeats.

    Engines in the policy's order, or in registry order all that take part in ``engine: auto`` and read models of
    `model_format`; for each the policy's device, or with ``device: auto`` each of `Engine.devices`. With both ``auto``,
    accelerators of every engine come before any CPU. Entries of ``execution.fallback`` follow.
    """
    candidates: dict[str, EngineCandidate] = {}
    for candidate in (*_primary(policy, machine, engines, model_format), *_fallback(policy, engines)):
        candidates.setdefault(str(candidate), candidate)
    return tuple(candidates.values())


def chooses_among_all_engines(policy: Policy) -> bool:
    """Whether the policy leaves the engine to the plan."""
    engine = policy.execution.engine
    return engine == "auto" or (not isinstance(engine, str) and tuple(engine) == ("auto",))


def _primary(
    policy: Policy, machine: Machine, engines: Mapping[str, Engine], model_format: str
) -> list[EngineCandidate]:
    stated, device = policy.execution.engine, normal_device(policy.execution.device)
    everything = chooses_among_all_engines(policy)
    if everything:
        names = [name for name, engine in engines.items() if engine.automatic and model_format in engine.formats]
    else:
        names = [stated] if isinstance(stated, str) else list(stated)
    pairs: list[EngineCandidate] = []
    for name in names:
        key = find_engine(name, engines)
        if key is None:
            pairs.append(EngineCandidate(engine=name, device=device, known=False))
        elif device != "auto":
            pairs.append(EngineCandidate(engine=key, device=device))
        else:
            offered = devices_of(engines[key], machine) or ("auto",)
            pairs.extend(EngineCandidate(engine=key, device=device) for device in offered)
    if everything and device == "auto":
        pairs.sort(key=lambda pair: pair.device.startswith("cpu") or pair.device == "auto")
    return pairs


def _fallback(policy: Policy, engines: Mapping[str, Engine]) -> Iterator[EngineCandidate]:
    for name, device in policy.execution.fallback_candidates:
        key = find_engine(name, engines)
        yield EngineCandidate(engine=key or name, device=normal_device(device), known=key is not None, fallback=True)


def normal_device(device: str) -> str:
    """Return the device with its index where one is always meant: ``"cuda"`` is ``"cuda:0"``."""
    text = str(device)
    return f"{text}:0" if text in {"cuda", "rocm", "dml"} else text


_ENGINE_CODES = frozenset({VerdictCode.ENGINE_MISSING, VerdictCode.ENGINE_BROKEN, VerdictCode.LIBRARY_MISSING})
#: Of engines that do not count where another one is broken: they are missing, or never had the device.
_ELSEWHERE = frozenset(
    {VerdictCode.ENGINE_MISSING, VerdictCode.DEVICE_UNSUPPORTED, VerdictCode.FORMAT_UNSUPPORTED, VerdictCode.NOT_NAMED}
)
_ARTIFACT_CODES = frozenset({VerdictCode.ARTIFACT_FOREIGN, VerdictCode.ARTIFACT_STALE})


def refusal(
    candidates: Sequence[EngineCandidate],
    verdicts: Sequence[Verdict],
    unmet: Mapping[str, Sequence[Control]],
    model_path: str,
) -> XpuRuntimeError:
    """Build the error for a request that nothing can run."""
    absent = [v for v in verdicts if v.code == VerdictCode.DEVICE_MISSING and v.candidate.endswith("@auto")]
    counted = [verdict for verdict in verdicts if verdict not in absent] or verdicts
    codes = {verdict.code for verdict in counted}
    device, engine = _one({c.device for c in candidates}), _one({c.engine for c in candidates})
    if not verdicts:
        return EngineUnavailable(
            f"nothing can run {model_path}: no engine is registered. "
            f"Fix: {reinstall_command()}, which registers those that come with it"
        )
    text = f"nothing can run {model_path}: " + _summary({verdict.code for verdict in verdicts}, len(verdicts))
    here = sorted(verdicts, key=lambda verdict: verdict.code in _ELSEWHERE | {VerdictCode.DEVICE_MISSING})
    lines = [_verdict_line(verdict) for verdict in here]  # first those that this machine could run
    for name, controls in unmet.items():
        lines.append(f"  keys that {name} does not enforce, and mode is strict:")
        lines.extend(f"  {line}" for line in control_lines(controls))
    message = "\n".join([text, *lines])

    if len(absent) == len(verdicts):  # engines were named, and there is none of their devices
        return EngineUnavailable(message, engine=engine)
    if codes <= {VerdictCode.ENGINE_UNKNOWN, VerdictCode.OPTION_INVALID}:
        return PolicyError(message, engine=engine)
    cuda = [c.device.startswith("cuda") for c in candidates]
    if VerdictCode.DEVICE_MISSING in codes and (all(cuda) or (codes == {VerdictCode.DEVICE_MISSING} and any(cuda))):
        return CudaError(message, device=device, engine=engine)
    if VerdictCode.DEVICE_MISSING in codes and codes <= _ELSEWHERE | {VerdictCode.DEVICE_MISSING}:
        return EngineUnavailable(message, device=device, engine=engine)
    if codes - _ELSEWHERE and codes - _ELSEWHERE <= {VerdictCode.LIBRARY_MISSING, VerdictCode.ENGINE_BROKEN}:
        return EngineUnavailable(message, device=device, engine=engine)  # one engine could, once its fault is fixed
    if codes & _ARTIFACT_CODES:
        return EngineError(message, device=device, engine=engine)
    if codes <= _ENGINE_CODES:
        return EngineUnavailable(message, device=device, engine=engine)
    return UnsupportedOperationError(message, device=device, engine=engine)


def control_lines(controls: Sequence[Control], mode: str = "strict") -> list[str]:
    """Return one line for each key: what was asked, what can be done, why, and the fix.

    Under strict, another mode is a fix of each.
    """
    lines = []
    for control in controls:
        told = f"  {control.key}: {control.requested} is {control.enforceability}: {_sentence(control.reason)}"
        lines.append(f"{told} Fix: {control.fix}" + ", or use mode: prefer" * (mode == "strict"))
    return lines


def _summary(codes: set[str], count: int) -> str:
    if codes == {VerdictCode.NOT_ENFORCEABLE}:
        return "mode is strict, and a key of the policy cannot be enforced"
    if codes == {VerdictCode.ENGINE_UNKNOWN}:
        return "the policy names an engine that is not registered"
    return "the one candidate was rejected" if count == 1 else f"all {count} candidates were rejected"


def _verdict_line(verdict: Verdict) -> str:
    fix = f" Fix: {verdict.fix}" if verdict.fix else ""
    return f"  {verdict.candidate}: {verdict.code}: {_sentence(verdict.reason)}{fix}"


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else text + "."


def _one(values: set[str]) -> str | None:
    return next(iter(values)) if len(values) == 1 else None


_NO_DEVICE = frozenset({VerdictCode.DEVICE_MISSING, VerdictCode.DEVICE_UNSUPPORTED})


def kinds_of(engine: Engine, machine: Machine) -> tuple[str, ...]:
    """Return the kinds of device that an engine drives, such as ``("cpu", "cuda")``."""
    if engine.device_kinds is not None:
        return engine.device_kinds
    return tuple(dict.fromkeys(device.partition(":")[0] for device in devices_of(engine, machine)))


def device_fix(
    candidate: EngineCandidate, request: PlanRequest, policy: Policy, machine: Machine, engines: Mapping[str, Engine]
) -> str | None:
    """Return what to change where an engine does not have the device asked for; ``None`` where nothing would help.

    What it names runs the model here: a device that the engine accepts, another engine on this device, an engine on the
    CPU; where none does, an engine with the command that installs it. Engines that the policy leaves to the plan have
    verdicts of their own.
    """
    free = chooses_among_all_engines(policy)
    if free and policy.execution.device == "auto":  # every device of every engine is tried
        return None

    def answer(name: str, device: str) -> Verdict:
        return judge(engines[name], request.on(device, policy), machine).verdict

    here = [
        device for device in devices_of(engines[candidate.engine], machine) if answer(candidate.engine, device).accepted
    ]
    parts = [f"use device {' or '.join(here)}"] if here else []
    stated = policy.execution.engine
    tried = {find_engine(name, engines) for name in ((stated,) if isinstance(stated, str) else stated)}
    others = [
        name
        for name, engine in engines.items()
        if name not in tried
        and engine.automatic
        and request.model.format in engine.formats
        and (request.purpose != "compile" or engine.compiles)
    ]
    for device in dict.fromkeys((candidate.device, "cpu")):
        kind = device.partition(":")[0]
        if (parts and (free or kind == "cpu")) or (free and device == candidate.device):
            continue
        answers = {name: answer(name, device) for name in others if kind in kinds_of(engines[name], machine)}
        running = [name for name, verdict in answers.items() if verdict.accepted]
        absent = [name for name, verdict in answers.items() if verdict.code == VerdictCode.ENGINE_MISSING]
        names = running or absent[:1]
        if not names:
            continue
        use = f"use device {device}" if device != candidate.device else ""
        if free:
            part = f"{use}, where {names[0]} runs the model" if running else use
        else:
            part = " with ".join(filter(None, (use, f"execution.engine: {' or '.join(names)}")))
            part = part if use else f"set {part}"
        parts.append(part if running else f"{part}, after {answers[names[0]].fix}")
    return ", or ".join(parts) or None


def with_free_choices(policy: KernelPolicy, controls: Iterable[Control], engine: str) -> list[Control]:
    """Return the controls, where a key of kernels that leaves the choice to the engine is enforced by any engine."""
    stated: dict[str, str | tuple[str, ...]] = {f"kernels.{op}": use for op, use in policy.preferences.items()}
    rules = {f"kernels.rules[{index}]": rule for index, rule in enumerate(policy.rules)}
    stated |= {key: rule.use for key, rule in rules.items() if rule.use is not None and rule.precision is None}
    by_key = {control.key: control for control in controls}
    for key, use in stated.items():
        names = (use,) if isinstance(use, str) else use
        requested = show(rules.get(key, use))
        if names[0] in ("auto", "torch"):
            reason = f"{names[0]} leaves the choice to the engine"
            if names[0] == "torch":
                reason = (
                    f"torch is what the framework runs by default, and {engine} runs without PyTorch: {engine} chooses"
                )
            by_key[key] = Control(
                key=key, requested=requested, resolved=ENGINE_CHOICE, enforceability="enforced", reason=reason
            )
        elif "torch" in names and key in by_key:
            by_key[key] = msgspec.structs.replace(by_key[key], requested=requested)
    return list(by_key.values())


def without_nodes(request: Request, controls: Iterable[Control]) -> list[Control]:
    """Return the controls, where a rule whose pattern names no node of the model is unsupported: it does nothing."""
    names = [node.name for node in request.model.nodes]
    known = NameSet(names)
    rules = request.policy.kernels.rules
    patterns = {f"kernels.rules[{index}]": rule.match.node for index, rule in enumerate(rules)}
    return [
        _nothing(control, pattern, names)
        if (pattern := patterns.get(control.key)) and not known.matches(pattern)
        else control
        for control in controls
    ]


def _nothing(control: Control, pattern: str, names: list[str]) -> Control:
    return msgspec.structs.replace(
        control,
        resolved="-",
        enforceability="unsupported",
        reason=f"the pattern {pattern!r} names no node of the model{question(nearest(pattern.strip('*'), names))}",
        fix="correct match.node, or remove the rule; `xrt explain` lists the nodes",
    )
