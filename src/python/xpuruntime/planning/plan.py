# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Plan`: the resolved choice, with every rejected candidate and the enforceability of every policy key."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from xpuruntime.argument_types import ArgumentType, check_types
from xpuruntime.engines.model.external import model_digest
from xpuruntime.errors import InputError
from xpuruntime.evidence.records import Control, Verdict, VerdictCode
from xpuruntime.files.paths import json_bytes, json_text
from xpuruntime.files.reading import decode_json
from xpuruntime.printable import printable
from xpuruntime.shown import Shown

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from xpuruntime.artifacts.manifest import Artifact
    from xpuruntime.engines.base import Engine, Request
    from xpuruntime.engines.model import ModelInfo
    from xpuruntime.policies import Policy
    from xpuruntime.runtime.machine import Library, Machine

SCHEMA = "xpuruntime.plan/1"


_JSON = ArgumentType("JSON text, str or bytes", lambda value: isinstance(value, (str, bytes, bytearray)))


class PlanRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be planned: a model, and what for. Everything else is in the policy."""

    model: ModelInfo
    calibration: Any = None
    artifact: Artifact | None = None
    purpose: Literal["run", "compile", "search"] = "run"

    def on(self, device: str, policy: Policy) -> Request:
        """Return what an engine is asked about one device. No model in ONNX is run by PyTorch."""
        from xpuruntime.engines.base import Request

        if self.model.format == "onnx":
            kernels = policy.kernels.without_framework()
            policy = policy if kernels is policy.kernels else policy.replace(kernels=kernels)
        return Request(
            model=self.model,
            device=device,
            policy=policy,
            calibration=self.calibration,
            artifact=self.artifact,
            purpose=self.purpose,
        )


class InputFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One input or output of a model: name, NumPy dtype name, shape.

    A text in the shape is a symbolic size, ``None`` an unknown one; a shape of ``None`` has an unknown rank.
    """

    name: str
    dtype: str
    shape: tuple[int | str | None, ...] | None


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan keeps of the model."""

    path: str
    sha256: str
    size: int
    nodes: int
    ops: dict[str, int]
    opsets: dict[str, int]
    inputs: tuple[InputFacts, ...]
    outputs: tuple[InputFacts, ...]
    digest: str | None = None

    @classmethod
    def of(cls, model: ModelInfo, artifact: Artifact | None = None) -> ModelFacts:
        """Take the facts a plan keeps from an inspected model, or from the one that an artifact was made of."""
        return cls(
            digest=artifact.manifest.model_sha256 if artifact is not None else model_digest(model),
            path=str(model.path),
            sha256=model.sha256,
            size=model.size,
            nodes=len(model.nodes),
            ops={str(k): int(v) for k, v in sorted(model.ops.items())},
            opsets={str(k): int(v) for k, v in sorted(model.opsets.items())},
            inputs=tuple(InputFacts(name=t.name, dtype=t.dtype, shape=t.shape) for t in model.inputs),
            outputs=tuple(InputFacts(name=t.name, dtype=t.dtype, shape=t.shape) for t in model.outputs),
        )


class Plan(Shown, msgspec.Struct, frozen=True, kw_only=True):
    """What will run, decided from facts alone, before anything is loaded.

    Attributes
    ----------
    mode : {"prefer", "strict", "auto"}
    model : ModelFacts
    engine, device : str
        The choice, such as ``"onnxruntime"`` on ``"cuda:0"``.
    engine_version : str or None
    precision : str
        The precision the policy asks for; ``"model"`` keeps the model's own.
    policy : dict
        The whole policy as plain values.
    verdicts : tuple of Verdict
        Every candidate in the order tried, the chosen one included.
    controls : tuple of Control
        One for each policy key that was stated.
    settings : dict
        What the engine will be given, such as its provider options.
    warnings : tuple of str
        What a user must know before running: keys that are not enforced, a fallback taken, a device passed over.
    notes : tuple of str
        Why this candidate was chosen.
    policy_source : {"stated", "default", "model metadata", "artifact"}
        Where the policy comes from: the caller, nobody, the model itself, or the artifact.
    calibration : str or None
        Digest of the inputs that it is quantized with.
    execution : ExecutionFacts or None
        The device, driver and libraries; ``None`` in a plan of a version that did not note them.
    """

    mode: str
    model: ModelFacts
    engine: str
    device: str
    precision: str
    policy: dict[str, Any]
    verdicts: tuple[Verdict, ...]
    controls: tuple[Control, ...] = ()
    settings: dict[str, Any] = {}
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    engine_version: str | None = None
    policy_source: str = "stated"
    calibration: str | None = None
    execution: ExecutionFacts | None = None
    schema: str = SCHEMA

    @property
    def headline(self) -> str:
        """The choice in a few words."""
        return f"{self.candidate} runs it: precision {self.precision}, mode {self.mode}"

    @property
    def candidate(self) -> str:
        """The choice as ``"engine@device"``."""
        return f"{self.engine}@{self.device}"

    @property
    def accepted(self) -> Verdict:
        """The verdict of the chosen candidate."""
        return next(v for v in self.verdicts if v.accepted)

    @property
    def rejected(self) -> tuple[Verdict, ...]:
        """The candidates that were tried and refused, in order."""
        return tuple(v for v in self.verdicts if not v.accepted and v.code != VerdictCode.NOT_TRIED)

    @property
    def request_hash(self) -> str:
        """A hash of what was asked: the model's contents, not its path, the whole policy, and calibration inputs.

        Equal in every process and on every machine, whatever engine or device is chosen there.
        """
        return _hash("request", self.model.digest or self.model.sha256, self.policy, self.calibration)

    @property
    def execution_hash(self) -> str:
        """A hash of what executes it: engine, libraries, device, driver, settings, and kernels with configurations.

        Two plans with equal hashes run on equal devices, by the same builds of the engine and of its libraries, given
        the same settings. Where a build ID is not known, the version and size of the file stand for it. It covers
        neither the model nor the rest of the policy, which `request_hash` does, nor what a library chooses by itself
        as it runs.
        """
        chosen = (self.engine, self.engine_version, self.precision)
        return _hash("execution", *chosen, self.settings, self.kernels, self.execution)

    @property
    def kernels(self) -> dict[str, Any] | None:
        """What the policy says of kernels, such as ``{"matmul": "cublas.matmul_lt@3"}``, as plain values."""
        return self.policy.get("kernels")

    def control(self, key: str) -> Control | None:
        """Return the control of one policy key, or ``None`` when the policy does not state it."""
        return next((c for c in self.controls if c.key == key), None)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values, with its hashes."""
        plain: dict[str, Any] = msgspec.to_builtins(self, enc_hook=str)
        hashes = {"request_hash": self.request_hash, "execution_hash": self.execution_hash}
        return {"schema": plain.pop("schema"), **hashes, **plain}

    def to_json(self, *, indent: int = 2) -> str:
        """Return the plan as JSON text."""
        return json_text(self.to_dict(), indent=indent)

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """Read a plan back from `to_json`.

        Raises
        ------
        InputError
            The text is not a plan of this schema, or was changed after it was written.
        """
        check_types({"text": _JSON}, {"text": text})
        try:
            plain = decode_json(text)
            plan = msgspec.convert(plain, cls)
        except msgspec.MsgspecError as error:
            raise InputError(f"this is not a plan: {error}. Fix: write one with `xrt plan MODEL --json`") from error
        if plan.schema != SCHEMA:
            raise InputError(
                f"this plan has schema {plan.schema!r}, this version reads {SCHEMA!r}. Fix: make the plan again"
            )
        for name in ("request_hash", "execution_hash"):
            if plain.get(name, getattr(plan, name)) != getattr(plan, name):
                msg = f"this plan was changed after it was written: its {name} is of other contents. Make it again"
                raise InputError(msg)
        return plan

    def __str__(self) -> str:
        """Return the plan as plain text, one fact a line."""
        return plan_text(self)

    def __rich__(self) -> RenderableType:
        """Return the plan as rich tables."""
        return plan_tables(self)


def _hash(*what: object) -> str:
    text = json_bytes((SCHEMA, *what), enc_hook=str, order="deterministic")
    return "sha256:" + hashlib.sha256(text).hexdigest()


_COLOUR = {"enforced": "green", "advisory": "yellow", "unsupported": "red"}


def plan_text(plan: Plan) -> str:
    """Return the plan as plain text."""
    return printable("\n".join(_lines(plan)))


def plan_tables(plan: Plan) -> RenderableType:
    """Return the plan as a group of rich tables."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from xpuruntime.tables import table

    head = Table.grid(padding=(0, 2))
    head.add_column(style="bold", no_wrap=True)
    head.add_column(overflow="fold")
    for name, value in _facts(plan):
        head.add_row(name, Text(value[: len("sha256:") + 12] if value.startswith("sha256:") else value))

    tried = table("candidates", ("candidate", "verdict", "reason"))
    for verdict in plan.verdicts:
        if verdict.code != VerdictCode.NOT_TRIED:
            colour = "green" if verdict.accepted else "red"
            reason = _reason(verdict.reason, verdict.fix)
            tried.add_row(Text(verdict.candidate), Text(verdict.code, style=colour), reason)

    parts: list[RenderableType] = [Text(plan.headline, "bold green"), head, tried]
    after = [verdict.candidate for verdict in plan.verdicts if verdict.code == VerdictCode.NOT_TRIED]
    if after:
        parts.append(Text(f"not tried, because {plan.candidate} comes before: {', '.join(after)}", style="dim"))
    if plan.controls:
        keys = table("policy keys", ("key", "?requested", "resolved", "enforceability"))
        for control in plan.controls:
            colour = _COLOUR[control.enforceability]
            keys.add_row(
                Text(control.key),
                Text(control.requested),
                Text(control.resolved),
                Text.assemble((control.enforceability, colour), ": ", _reason(control.reason, control.fix)),
            )
        parts.append(keys)
    if plan.settings:
        settings = table("settings given to the engine", ("setting", "value"))
        for name, value in _flat(plan.settings):
            settings.add_row(Text(name), Text(value))
        parts.append(settings)
    parts.extend(Text(f"warning: {line}", style="yellow") for line in plan.warnings)
    parts.extend(Text(f"note: {line}", style="dim") for line in plan.notes)
    return Group(*parts)


def _reason(reason: str, fix: str | None) -> Text:
    from rich.text import Text

    return Text.assemble(reason, (f"\nfix: {fix}", "bold")) if fix else Text(reason)


def _facts(plan: Plan) -> Iterator[tuple[str, str]]:
    model = plan.model
    nodes = "1 node" if model.nodes == 1 else f"{model.nodes} nodes"
    yield "model", f"{model.path} ({nodes}, {model.size:,} bytes, sha256 {model.sha256[:12]})"
    yield "inputs", ", ".join(_tensor(t) for t in model.inputs) or "none"
    yield "outputs", ", ".join(_tensor(t) for t in model.outputs) or "none"
    if plan.policy_source in ("model metadata", "artifact"):
        yield "policy", f"from {plan.policy_source}"
    yield "mode", plan.mode
    yield "engine", plan.engine + (f" {plan.engine_version}" if plan.engine_version else "")
    yield "device", plan.device
    yield "precision", plan.precision
    yield "request hash", plan.request_hash
    yield "execution hash", plan.execution_hash


def _lines(plan: Plan) -> Iterator[str]:
    yield f"plan: {plan.candidate}"
    for name, value in _facts(plan):
        yield f"  {name}: {value}"
    yield "candidates:"
    for verdict in plan.verdicts:
        fix = f" Fix: {verdict.fix}" if verdict.fix else ""
        yield f"  {verdict.candidate}: {verdict.code}: {verdict.reason}{fix}"
    if plan.controls:
        yield "policy keys:"
        for control in plan.controls:
            fix = f" Fix: {control.fix}" if control.fix else ""
            yield (
                f"  {control.key}: {control.requested} -> {control.resolved}: "
                f"{control.enforceability}: {control.reason}{fix}"
            )
    if plan.settings:
        yield "settings:"
        for name, value in _flat(plan.settings):
            yield f"  {name}: {value}"
    for line in plan.warnings:
        yield f"warning: {line}"
    for line in plan.notes:
        yield f"note: {line}"


def _tensor(tensor: InputFacts) -> str:
    sizes = "..." if tensor.shape is None else ", ".join("?" if size is None else str(size) for size in tensor.shape)
    return f"{tensor.name}: {tensor.dtype}[{sizes}]"


def _flat(settings: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _flat(value, f"{name}.")
        elif value not in (None, (), [], False):
            yield name, str(value)


class LibraryIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """A shared library as a build: equal wherever the same file is installed. See `Library` for the fields."""

    name: str
    version: str | None = None
    build_id: str | None = None
    size: int | None = None


class DeviceIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """A device as a model: equal for two devices that compute alike, so without index, address or memory."""

    kind: str
    name: str | None = None
    architecture: str | None = None
    features: tuple[str, ...] = ()
    units: int | None = None


class ExecutionFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan is executed on and by."""

    device: DeviceIdentity
    driver: str | None = None
    libraries: tuple[LibraryIdentity, ...] = ()
    xpuruntime: str = ""


def execution_facts(engine: Engine, device: str, machine: Machine) -> ExecutionFacts:
    """Return the facts of an engine on one device of a machine. Pure."""
    from xpuruntime import __version__

    facts = machine.engines.get(engine.name)
    kind, _, index = device.partition(":")
    driver: str | None = None
    gpu = next((device for device in machine.cuda if kind == "cuda" and device.index == int(index or 0)), None)
    if gpu is not None:
        driver = "{}.{}".format(*gpu.driver_version)
        architecture = "sm{}{}".format(*gpu.compute_capability)
        identity = DeviceIdentity(kind=kind, name=gpu.name, architecture=architecture, units=gpu.sm_count)
    elif kind == "cpu":
        cpu = machine.cpu
        identity = DeviceIdentity(
            kind=kind, name=cpu.name, architecture=machine.architecture, features=cpu.features, units=cpu.cores
        )
    else:
        identity = DeviceIdentity(kind=kind, name=engine.device_name(device, machine))
    libraries: list[Library] = []
    if facts is not None:
        libraries += (*facts.libraries, *(facts.cuda_libraries if kind == "cuda" else ()))
    if machine.core is not None:
        libraries.append(machine.core)
    return ExecutionFacts(
        device=identity,
        driver=driver,
        libraries=tuple(
            LibraryIdentity(name=library.name, version=library.version, build_id=library.build_id, size=library.size)
            for library in libraries
        ),
        xpuruntime=__version__,
    )
