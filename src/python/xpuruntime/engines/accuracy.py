# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The accuracy probe: a loaded model, on any engine, is compared with fp32 on the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.errors import AccuracyError, EngineError, InputError, ModelError, XpuRuntimeError

if TYPE_CHECKING:
    from pathlib import Path

    from xpuruntime.engines.base import Engine, Judgement, LoadedModel, Request
    from xpuruntime.evidence.tolerances import ProbeResult, Tolerance
    from xpuruntime.runtime.machine import Machine

GENERATED = "generated"
#: Precisions that change the graph of a model which is in another one.
_CONVERTED = ("fp16", "bf16")
#: Precision of a model by the type of its weights.
_STORED = {"float16": "fp16", "bfloat16": "bf16"}
#: Settings of adapters that have the graph converted or quantized.
_CONVERTING = ("convert", "qdq", "quantize")


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """A probe input and what the reference answers to it: arrays by name. `origin` says where the input is from."""

    feeds: dict[str, Any]
    outputs: dict[str, Any]
    origin: str = "generated"


class AccuracyCheck(msgspec.Struct, frozen=True):
    """Reference and limits of a loaded model, and whether a result beyond them is refused or only reported."""

    tolerance: Tolerance
    refuses: bool


def check_due(request: Request, judgement: Judgement) -> AccuracyCheck | None:
    """Return what a loaded model has to meet, or ``None`` where nothing is checked.

    A model is checked where the policy states an accuracy, and where the precision of its graph was changed. Limits
    that the policy leaves open are those of the precision. An engine that says it can meet no accuracy is not asked.
    Where the engine computes in a precision that nobody asked for (`Judgement.settings`, ``computes``), a model beyond
    the limits of that precision is refused in mode ``strict``, and reported in the others.
    """
    levels = {control.key: control.enforceability for control in judgement.controls}
    stated = [level for key, level in levels.items() if key.startswith("accuracy.")]
    wanted = request.policy.accuracy
    if stated and all(level == "unsupported" for level in stated):
        wanted = None
    precision = request.policy.execution.precision
    changed = precision in _CONVERTED or (precision == "int8" and _was_quantized(request))
    if levels.get("execution.precision") == "unsupported":  # of some nodes, where others are converted all the same
        changed = any(judgement.setting(name) for name in _CONVERTING)
    computes = judgement.setting("computes")
    if wanted is None and not changed and computes is None:
        return None
    requested = wanted is not None or changed or request.policy.mode == "strict"
    return AccuracyCheck(limits_of(request, computes), requested)


def limits_of(request: Request, computes: str | None) -> Tolerance:
    """Return how far from the reference a model may be: what the policy states, the rest by its precision.

    `computes` is the precision of the arithmetic, where that is not the one asked for.
    """
    from xpuruntime.evidence.tolerances import TOLERANCES

    precision, wanted = computes or request.policy.execution.precision, request.policy.accuracy
    if precision == "model":
        precision = next((_STORED[dtype] for dtype in request.model.weights if dtype in _STORED), "fp32")
    if request.model.quantization.scheme != "none":  # one step of its own quantizers is more than any float rounds
        precision = "int8"
    row = TOLERANCES.get(precision) or TOLERANCES["fp32"]
    if wanted is None:
        return row
    limits = {name: getattr(wanted, name) for name in ("rtol", "atol", "cosine")}
    stated = {name: value for name, value in limits.items() if value is not None}
    return msgspec.structs.replace(row, **stated, cosine_stated=wanted.cosine is not None)


def _was_quantized(request: Request) -> bool:
    calibrated = request.artifact is not None and request.artifact.manifest.calibration is not None
    return request.calibration is not None or calibrated


def make_reference(
    request: Request, engine: Engine | None, machine: Machine, feeds: Mapping[str, Any] | None = None
) -> Reference:
    """Run the model as it is, in fp32 on the CPU.

    ONNX models run on ONNX Runtime; models of another format on the engine itself, on its CPU.
    """
    return make_references(request, engine, machine, None if feeds is None else [feeds])[0]


def make_references(
    request: Request, engine: Engine | None, machine: Machine, samples: Sequence[Mapping[str, Any]] | None
) -> list[Reference]:
    """Run the model as it is on several inputs, as `make_reference` on one; it is loaded once."""
    from xpuruntime.engines.precision.probe import ProbeRefusedError, probe_refused

    try:
        sample_feeds, origin = _made(request) if samples is None else (samples, "given")
    except InputError as error:
        raise ProbeRefusedError(error.reason, fix="give inputs= (on the command line: --input)") from None
    try:
        loaded = unconverted(request, engine, machine)
        try:
            outputs = [dict(loaded.run(dict(feeds))) for feeds in sample_feeds]
        except XpuRuntimeError as error:
            if origin != GENERATED:
                raise
            raise probe_refused(request.model, sample_feeds[0], error) from None
        finally:
            loaded.close()
    except ProbeRefusedError:
        raise
    except XpuRuntimeError as error:
        msg = f"{request.model.path} cannot be compared with fp32 on the CPU, which does not run it: {error.reason}"
        fix = _without_probe(request, error.fix)
        raise type(error)(msg, fix=fix, engine=error.engine, device=error.device, status=error.status) from None
    return [
        Reference(feeds=dict(feeds), outputs=expected, origin=origin)
        for feeds, expected in zip(sample_feeds, outputs, strict=True)
    ]


def _without_probe(request: Request, fix: str | None) -> str:
    changes = []
    if request.policy.accuracy is not None:
        changes.append("leave `accuracy` out of the policy")
    if request.policy.execution.precision in (*_CONVERTED, "int8"):
        changes.append("use precision: fp32")
    text = " and ".join(changes)
    if fix is not None:
        return f"{fix}. Or {text}" if text else fix
    return text or "run it with precision: fp32 on the CPU first, which names the fault"


def _made(request: Request) -> tuple[Sequence[Mapping[str, Any]], str]:
    from xpuruntime.engines.model import with_shapes
    from xpuruntime.engines.precision import probe_feeds

    if request.calibration is not None:
        return [next(iter(request.calibration))], "the first calibration input"
    return [probe_feeds(with_shapes(request.model, request.policy))], GENERATED


def unconverted(request: Request, engine: Engine | None, machine: Machine) -> LoadedModel:
    """Return the model as it is, loaded on the CPU: by ONNX Runtime wherever it is an ONNX graph."""
    from xpuruntime.engines.base import Request as Plain
    from xpuruntime.engines.base import judge
    from xpuruntime.engines.registry import default_registry
    from xpuruntime.policies import ExecutionPolicy, Policy

    graph = None if engine is None else engine.as_onnx(request.model)
    model = request.model if graph is None else graph[0]
    reference = default_registry().get("onnxruntime") if engine is None or model.format == "onnx" else engine
    execution = request.policy.execution
    plain_execution = ExecutionPolicy(
        device="cpu",
        engine=reference.name,
        threads=execution.threads,
        provider_options=reference.operator_options(execution.provider_options),
    )
    policy = Policy(execution=plain_execution)
    plain = Plain(model=model, device="cpu", policy=policy)
    if reference.name not in machine.engines:  # the registry of this session may not have it
        machine = msgspec.structs.replace(machine, engines={reference.name: reference.probe()})
    judgement = judge(reference, plain, machine)
    if not judgement.verdict.accepted:
        verdict = judgement.verdict
        raise EngineError(
            f"{reference.name} refuses it: {verdict.reason}", fix=verdict.fix, engine=reference.name, device="cpu"
        )
    loaded = reference.load(plain, judgement, machine)
    return loaded if graph is None else graph[1](loaded)


def check_accuracy(
    request: Request, engine: str, loaded: LoadedModel, reference: Reference, check: AccuracyCheck
) -> ProbeResult:
    """Run the probe input and compare."""
    from xpuruntime.evidence.tolerances import compare_within

    answer, tolerance = loaded.run(reference.feeds), check.tolerance
    result = compare_within(reference.outputs, answer, tolerance, request.model.random_outputs)
    if not result.passed and check.refuses:
        where = "fp32 on the CPU" if request.model.format == "onnx" else "the unconverted model on the CPU"
        msg = f"{request.model.path} on {request.device} does not agree with {where}: {result}"
        raise AccuracyError(msg, engine=engine, device=request.device)
    return result


def write_reference(reference: Reference, path: Path) -> bool:
    """Write a reference to a file, and say whether that can be done: it must hold plain arrays alone."""
    import io
    import zipfile

    import numpy as np

    arrays = {f"in/{name}": array for name, array in reference.feeds.items()}
    arrays |= {f"out/{name}": array for name, array in reference.outputs.items()}
    if not all(isinstance(array, np.ndarray) and array.dtype.kind in "biufcU" for array in arrays.values()):
        return False
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("origin", reference.origin)
        for index, (name, array) in enumerate(arrays.items()):
            buffer = io.BytesIO()
            np.lib.format.write_array(buffer, np.asarray(array, order="C"), allow_pickle=False)
            archive.writestr(f"{index}/{name}", buffer.getvalue())
    return True


def read_reference(path: Path) -> Reference:
    """Read what `write_reference` wrote."""
    import io
    import zipfile
    import zlib

    import numpy as np

    from xpuruntime.files.reading import unpacked_too_large

    parts: dict[str, dict[str, Any]] = {"in": {}, "out": {}}
    origin = "generated"
    try:
        with zipfile.ZipFile(path) as archive:
            reason = unpacked_too_large(archive, path.stat().st_size)
            if reason is not None:
                raise ValueError(reason)
            for entry in archive.namelist():
                data = archive.read(entry)
                if entry == "origin":
                    origin = data.decode()
                    continue
                _, side, name = entry.split("/", 2)
                parts[side][name] = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    except (
        OSError,
        ValueError,
        EOFError,
        KeyError,
        MemoryError,
        NotImplementedError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        msg = f"the probe input {path} of the artifact cannot be read: {error}. Fix: compile the model again"
        raise ModelError(msg) from None
    return Reference(feeds=parts["in"], outputs=parts["out"], origin=origin)
