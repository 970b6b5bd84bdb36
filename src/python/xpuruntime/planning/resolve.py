# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`resolve`: the decision which engine and device run a model, as a pure function of stated facts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from xpuruntime.artifacts.manifest import artifact_controls, foreign_artifact, refuse_compiling, stale_artifact
from xpuruntime.engines.base import Engine, Judgement, Refusal, judge
from xpuruntime.engines.known_errors import control_of, not_swept, seen_on_simulator
from xpuruntime.engines.quantization.judge import calibration_digest
from xpuruntime.engines.registry import default_registry
from xpuruntime.errors import PolicyError
from xpuruntime.evidence.records import Control, Verdict, VerdictCode
from xpuruntime.files.paths import json_bytes
from xpuruntime.planning.candidates import (
    KNOWN_EXTRAS,
    EngineCandidate,
    chooses_among_all_engines,
    control_lines,
    device_fix,
    devices_of,
    find_engine,
    kinds_of,
    list_candidates,
    nearest_engine,
    refusal,
    with_free_choices,
    without_nodes,
)
from xpuruntime.planning.plan import ModelFacts, Plan, PlanRequest, execution_facts
from xpuruntime.policies.document import question
from xpuruntime.runtime.machine import EngineFacts, Machine
from xpuruntime.runtime.packages import install_command
from xpuruntime.runtime.telemetry import log_decision

if TYPE_CHECKING:
    from xpuruntime.policies import Policy

#: A candidate that ``auto`` offered and that was passed over for one of these reasons deserves a warning: the machine
#: has the device, but it cannot be used until something is fixed.
_MENDABLE = frozenset({VerdictCode.LIBRARY_MISSING, VerdictCode.ENGINE_BROKEN})


class Resolution(NamedTuple):
    """What will run: the plan for the record, and the judgement that its engine loads from."""

    plan: Plan
    judgement: Judgement


def resolve(request: PlanRequest, policy: Policy, machine: Machine, engines: Mapping[str, Engine]) -> Plan:
    """Decide which engine and device run a model, touching neither; as `decide`, for the plan alone."""
    return decide(request, policy, machine, engines).plan


def decide(request: PlanRequest, policy: Policy, machine: Machine, engines: Mapping[str, Engine]) -> Resolution:
    """Decide which engine and device run a model, touching neither."""
    candidates = list_candidates(policy, machine, engines, request.model.format)
    unknown = [candidate for candidate in candidates if not candidate.known and candidate.engine not in KNOWN_EXTRAS]
    if unknown:  # a mistake in the policy, whether or not it would be tried
        raise refusal(unknown, [_unknown(candidate, engines) for candidate in unknown], {}, str(request.model.path))
    for name in policy.execution.provider_options:
        if find_engine(name, engines) is None and name not in default_registry():
            reason, written, other = _misspelt(name, engines)
            raise PolicyError(reason, fix=f"write execution.provider_options.{written}, or {other}", engine=name)
    verdicts: list[Verdict] = []
    unmet: dict[str, Sequence[Control]] = {}
    chosen: tuple[EngineCandidate, Judgement] | None = None
    for candidate in candidates:
        if chosen is not None:
            verdicts.append(_not_tried(candidate, chosen[0]))
            continue
        if not candidate.known:
            verdicts.append(_unknown(candidate, engines))
            continue
        judgement = judge_candidate(candidate, request, policy, machine, engines)
        if (
            judgement.verdict.code == VerdictCode.OPTION_INVALID
        ):  # a mistake in the policy: no other engine runs in spite of it
            raise refusal([candidate], [judgement.verdict], {}, str(request.model.path))
        short = [control for control in judgement.controls if control.enforceability != "enforced"]
        if judgement.verdict.accepted and policy.mode == "strict" and short:
            unmet[str(candidate)] = short
            verdicts.append(_not_enforceable(candidate, short))
            continue
        verdicts.append(judgement.verdict)
        if judgement.verdict.accepted:
            chosen = candidate, judgement
    if chosen is None:
        raise refusal(candidates, verdicts, unmet, str(request.model.path))
    winner, judgement = chosen
    model = str(request.model.path)
    for verdict in verdicts:
        if not verdict.accepted:
            facts = {"candidate": verdict.candidate, "code": verdict.code}
            log_decision("plan", "DEBUG", "candidate", _why(verdict), model=model, **facts)
    level, how = ("WARNING", "taken as a fallback") if winner.fallback else ("INFO", "chosen")
    text = f"{winner} is {how} for {model}"
    facts = {"engine": winner.engine, "device": winner.device, "mode": policy.mode}
    log_decision("plan", level, "plan", text, model=model, fallback=winner.fallback, **facts)
    return Resolution(plan_of(request, policy, machine, engines, winner, judgement, verdicts), judgement)


def plan_of(
    request: PlanRequest,
    policy: Policy,
    machine: Machine,
    engines: Mapping[str, Engine],
    winner: EngineCandidate,
    judgement: Judgement,
    verdicts: Sequence[Verdict],
) -> Plan:
    """Return the plan of a candidate that was accepted."""
    facts = machine.engines.get(winner.engine)
    return Plan(
        mode=policy.mode,
        model=ModelFacts.of(request.model, request.artifact),
        engine=winner.engine,
        engine_version=facts.version if facts else None,
        device=winner.device,
        precision=policy.execution.precision,
        policy=policy.replace(verify=None).to_dict(),  # which asks nothing of a run
        verdicts=tuple(verdicts),
        controls=judgement.controls,
        settings=msgspec.json.decode(json_bytes(judgement.settings, enc_hook=str)),  # as it is read back
        calibration=calibration_digest(request.on(winner.device, policy)),
        warnings=tuple(_warnings(policy, winner, judgement, verdicts)),
        notes=tuple(_notes(request, policy, machine, winner, judgement, verdicts)),
        execution=execution_facts(engines[winner.engine], winner.device, machine),
    )


#: Formats of models, in words.
_FORMATS = {
    "genai": "a folder with genai_config.json",
    "onnx": "an ONNX model",
    "openvino-genai": "a folder that optimum-cli exported for OpenVINO",
    "pt2": "an exported program (.pt2)",
    "torch": "a module of PyTorch",
    "transformers": "a folder of Transformers",
}


def judge_candidate(
    candidate: EngineCandidate, request: PlanRequest, policy: Policy, machine: Machine, engines: Mapping[str, Engine]
) -> Judgement:
    """Return what an engine says of one candidate, with a control for every key that the policy states. Pure."""
    engine = engines[candidate.engine]
    if request.model.format not in engine.formats:
        *first, last = [_FORMATS.get(name, name) for name in engine.formats]
        takes = ", ".join(first) + " or " * bool(first) + last
        others = " or ".join(_taking(request, candidate, machine, engines))
        return Refusal(
            VerdictCode.FORMAT_UNSUPPORTED,
            f"the model is {_FORMATS.get(request.model.format, request.model.format)}, and {candidate.engine} takes "
            f"{takes}",
            (f"use execution.engine: {others}, or " if others else "") + f"give {candidate.engine} {takes}",
        ).judgement(candidate.engine, candidate.device)
    foreign = request.artifact and foreign_artifact(request.artifact, candidate.engine, candidate.device)
    if foreign:
        return Judgement(verdict=foreign)
    if request.purpose == "compile" and not engine.compiles:
        return Refusal(
            VerdictCode.COMPILE_UNSUPPORTED,
            f"{candidate.engine} makes no compiled artifact: it loads the model itself each time",
            "name an engine that compiles: "
            + (", ".join(name for name, engine in engines.items() if engine.compiles) or "none is registered"),
        ).judgement(candidate.engine, candidate.device)
    if candidate.device in devices_of(engine, machine) and _only_simulates(candidate, request, policy, machine):
        return Refusal(
            VerdictCode.NOT_NAMED,
            f"this machine has no such device, and the simulator of {candidate.engine} runs only when named",
            f"state engine: {candidate.engine}",
        ).judgement(candidate.engine, candidate.device)
    if _compiles_for_elsewhere(candidate, request, policy, machine):
        return Refusal(
            VerdictCode.NOT_NAMED,
            f"this machine has no {candidate.device}, and a model is compiled for another one only where it is named",
            f"state device: {candidate.device}",
        ).judgement(candidate.engine, candidate.device)
    if candidate.device == "auto":
        # The engine offers no device here: ask it about one that it drives, so that its own reason is reported.
        kinds = kinds_of(engine, machine) or ("cpu",)
        device = "cpu" if "cpu" in kinds else f"{kinds[0]}:0" if kinds[0] == "cuda" else kinds[0]
        answer = judge(engine, request.on(device, policy), machine).verdict
        if answer.accepted:
            answer = Refusal(
                VerdictCode.DEVICE_MISSING,
                "it has no device on this machine",
            ).verdict(candidate.engine, candidate.device)
        answer = _with_device_fix(
            answer, msgspec.structs.replace(candidate, device=device), request, policy, machine, engines
        )
        return Judgement(verdict=_signed(answer, candidate, engine))
    placed = request.on(candidate.device, policy)
    judgement = judge(engine, placed, machine)
    verdict = judgement.verdict
    if verdict.accepted:
        verdict = (
            refuse_compiling(engine, placed, judgement) or stale_artifact(engine, placed, judgement, machine) or verdict
        )
    verdict = _with_device_fix(verdict, candidate, request, policy, machine, engines)
    known = None
    if verdict.accepted and request.artifact is None and request.model.format == "onnx":
        facts = machine.engines.get(candidate.engine) or EngineFacts(name=candidate.engine)
        known = control_of(facts, candidate.device, request.model, machine.cpu.features)
    about_artifacts = artifact_controls(engine, placed, judgement)
    told = [control for control in judgement.controls if control.key not in about_artifacts]
    if request.model.format == "onnx":
        told = with_free_choices(policy.kernels, told, candidate.engine)
    return Judgement(
        verdict=_signed(verdict, candidate, engine),
        controls=_complete(
            candidate, policy, (*without_nodes(placed, told), *about_artifacts.values(), *((known,) if known else ()))
        ),
        settings=judgement.settings,
        uncompilable=judgement.uncompilable,
    )


def _with_device_fix(
    verdict: Verdict,
    candidate: EngineCandidate,
    request: PlanRequest,
    policy: Policy,
    machine: Machine,
    engines: Mapping[str, Engine],
) -> Verdict:
    """Return the verdict, with what runs here as the fix where the engine does not have the device."""
    if verdict.code not in (VerdictCode.DEVICE_MISSING, VerdictCode.DEVICE_UNSUPPORTED):
        return verdict
    of_cuda = verdict.code == VerdictCode.DEVICE_MISSING and candidate.device.startswith("cuda")
    if verdict.fix is not None and not of_cuda:
        return verdict
    fixes = [device_fix(candidate, request, policy, machine, engines), verdict.fix]
    if candidate.device.startswith("gpu") and "cuda" in kinds_of(engines[candidate.engine], machine):
        fixes.append("an NVIDIA GPU is device cuda:0")
    return msgspec.structs.replace(verdict, fix="; ".join(filter(None, fixes)) or None)


def _taking(
    request: PlanRequest, candidate: EngineCandidate, machine: Machine, engines: Mapping[str, Engine]
) -> Iterator[str]:
    kind = candidate.device.partition(":")[0]
    for name, engine in engines.items():
        if engine.automatic and request.model.format in engine.formats and kind in ("auto", *kinds_of(engine, machine)):
            yield name


def _only_simulates(candidate: EngineCandidate, request: PlanRequest, policy: Policy, machine: Machine) -> bool:
    if candidate.fallback or request.purpose == "compile" or request.artifact is not None:
        return False
    facts = machine.engines.get(candidate.engine)
    return facts is not None and facts.simulated and chooses_among_all_engines(policy)


def _compiles_for_elsewhere(candidate: EngineCandidate, request: PlanRequest, policy: Policy, machine: Machine) -> bool:
    """Whether a policy that leaves engine and device to the plan would compile for a device that is not here."""
    free = chooses_among_all_engines(policy) and policy.execution.device == "auto"
    return free and request.purpose == "compile" and candidate.device.startswith("cuda") and not machine.cuda


def _signed(verdict: Verdict, candidate: EngineCandidate, engine: Engine) -> Verdict:
    """Return a verdict under the name of its candidate; one on a missing engine names the extra that installs it."""
    fix = verdict.fix
    if (
        verdict.code == VerdictCode.ENGINE_MISSING
        and engine.extra is not None
        and f"xpuruntime[{engine.extra}]" not in (fix or "")
    ):
        install = install_command(engine.extra)
        fix = f"{install}; {fix}" if fix else install
    return msgspec.structs.replace(verdict, candidate=str(candidate), fix=fix)


def _complete(candidate: EngineCandidate, policy: Policy, controls: Sequence[Control]) -> tuple[Control, ...]:
    """Return a control for every stated key: planning's own keys, and the keys the engine says nothing about."""
    own = {
        "mode": "candidates and keys are judged by it",
        "execution.engine": "only the engines of the policy are tried, in its order",
        "execution.device": "no other device is tried",
        "execution.fallback": "tried in this order after the candidates above, and nothing else",
    }
    resolved = {
        "mode": policy.mode,
        "execution.engine": candidate.engine,
        "execution.device": candidate.device,
        "execution.fallback": f"used: {candidate}" if candidate.fallback else "not needed",
    }
    by_key = {control.key: control for control in controls}
    covered = {part for key in by_key for part in (key, *_parents(key))}
    for key, value in policy.stated().items():
        if key in own and key in by_key:  # the engine may say how it is checked; what became of it is known here
            by_key[key] = msgspec.structs.replace(by_key[key], requested=_text(value), resolved=resolved[key])
        if key in covered or any(parent in by_key for parent in _parents(key)):
            continue
        covered.update((key, *_parents(key)))
        if key in own:
            by_key[key] = Control(
                key=key, requested=_text(value), resolved=resolved[key], enforceability="enforced", reason=own[key]
            )
        else:
            by_key[key] = Control(
                key=key,
                requested=_text(value),
                resolved="-",
                enforceability="unsupported",
                reason=f"the engine {candidate.engine} has no control for this key",
            )
    return tuple(_with_fix(control) for control in by_key.values())


def _with_fix(control: Control) -> Control:
    """Return a control that states a fix where it is not enforced: first what obeys the request."""
    if control.enforceability == "enforced" or control.fix is not None:
        return control
    named = f"name an engine or a device that enforces {control.key} (`xrt plan` shows what each does)"
    other = "accept that with mode: auto" if control.enforceability == "advisory" else "leave the key out"
    return msgspec.structs.replace(control, fix=f"{named}, or {other}")


def _parents(key: str) -> list[str]:
    return [key[:index] for index, character in enumerate(key) if character in ".["]


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    plain = msgspec.to_builtins(value.to_plain() if hasattr(value, "to_plain") else value, enc_hook=str)
    if isinstance(plain, (list, tuple)) and all(isinstance(item, str) for item in plain):
        return ", ".join(plain)
    return json_bytes(plain, order="sorted").decode()


def _unknown(candidate: EngineCandidate, engines: Mapping[str, Engine]) -> Verdict:
    if candidate.engine in KNOWN_EXTRAS:
        install = install_command(KNOWN_EXTRAS[candidate.engine])
        return Refusal(
            VerdictCode.ENGINE_MISSING,
            f"no adapter for {candidate.engine} is registered (registered: {', '.join(engines) or 'none'})",
            f"install a package that registers {candidate.engine}; the vendor's own package comes with {install}",
        ).verdict(candidate.engine, candidate.device)
    reason, near, other = _misspelt(candidate.engine, engines)
    written = near + f"@{candidate.device}" * candidate.fallback
    return Refusal(
        VerdictCode.ENGINE_UNKNOWN,
        reason,
        f"write {written} in execution.{'fallback' if candidate.fallback else 'engine'}, or {other}",
    ).verdict(candidate.engine, candidate.device)


def _misspelt(name: str, engines: Mapping[str, Engine]) -> tuple[str, str, str]:
    near = nearest_engine(name, engines)
    return (
        f"no engine is named '{name}'{question(near, ';')} registered: {', '.join(engines) or 'none'}",
        near or next(iter(engines), "onnxruntime"),
        f"install the package that registers {name}",
    )


def _not_tried(candidate: EngineCandidate, winner: EngineCandidate) -> Verdict:
    return Refusal(
        VerdictCode.NOT_TRIED,
        f"{winner} comes before it and was accepted",
    ).verdict(candidate.engine, candidate.device)


def _not_enforceable(candidate: EngineCandidate, short: Sequence[Control]) -> Verdict:
    keys = ", ".join(control.key for control in short)
    return Refusal(
        VerdictCode.NOT_ENFORCEABLE,
        f"mode is strict and these keys cannot be enforced: {keys}",
        "name an engine or a device that enforces them, or set mode: prefer to run all the same",
    ).verdict(candidate.engine, candidate.device)


def _warnings(policy: Policy, winner: EngineCandidate, judgement: Judgement, verdicts: Sequence[Verdict]) -> list[str]:
    lines: list[str] = []
    before = [v for v in verdicts if not v.accepted and v.code != VerdictCode.NOT_TRIED]
    if winner.fallback:
        lines.append(f"execution.fallback was used: {winner} runs, because " + "; ".join(map(_why, before)))
    else:
        lines.extend(f"{_why(v)}; {winner} runs instead" for v in before if v.code in _MENDABLE)
    if policy.mode == "prefer":
        short = [control for control in judgement.controls if control.enforceability != "enforced"]
        lines.extend(line.strip() for line in control_lines(short, policy.mode))
    return lines


#: Notes on a model file in a plan.
_NOTED = 8


def _notes(
    request: PlanRequest,
    policy: Policy,
    machine: Machine,
    winner: EngineCandidate,
    judgement: Judgement,
    verdicts: Sequence[Verdict],
) -> list[str]:
    before = [v for v in verdicts if not v.accepted and v.code != VerdictCode.NOT_TRIED]
    which = "the only candidate" if len(verdicts) == 1 else "the first candidate that can run it"
    lines = [f"{winner} is {which}: {judgement.verdict.reason}"]
    facts = machine.engines.get(winner.engine)
    if facts is not None and (unknown := not_swept(winner.engine, facts.version)) is not None:
        lines.append(unknown)
    if request.artifact is not None:
        lines.append(f"loaded from artifact {request.artifact.folder}")
    elif facts is not None and request.model.format == "onnx":
        known = seen_on_simulator(facts, winner.device, request.model)
        lines += [known] if known else []
    lines.extend(f"the file is not as the ONNX standard wants it: {note}" for note in request.model.notes[:_NOTED])
    if before:
        lines.append("rejected before it: " + ", ".join(f"{v.candidate} ({v.code})" for v in before))
    if policy.mode == "auto":
        lines.extend(
            f"mode auto leaves {c.key} to {winner.engine}: {c.requested} is {c.enforceability}: {c.reason}"
            for c in judgement.controls
            if c.enforceability != "enforced"
        )
    return lines


def _why(verdict: Verdict) -> str:
    reason = verdict.reason.rstrip(".")
    return f"{verdict.candidate} was rejected ({verdict.code}): {reason}" + (
        f". Fix: {verdict.fix}" if verdict.fix else ""
    )
