# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Engine`: the interface of an inference engine, with what it is asked and what it answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, NamedTuple, Protocol

import msgspec

from xpuruntime.engines.loaded_model import Binding, LoadedModel, Observed, closed
from xpuruntime.errors import PolicyError, UnsupportedOperationError
from xpuruntime.evidence.records import Verdict, VerdictCode
from xpuruntime.policies.compound_kinds import FrozenDict
from xpuruntime.runtime.machine import EngineFacts
from xpuruntime.runtime.packages import guarded, install_command

__all__ = [
    "Binding",
    "Compiled",
    "Engine",
    "EngineSettings",
    "Judgement",
    "LoadedModel",
    "Observed",
    "PackagedEngine",
    "Recipe",
    "Refusal",
    "Request",
    "Resolved",
    "Tunable",
    "WorkRecorder",
    "closed",
    "judge",
    "missing_cuda_device",
    "of_options",
    "of_policy",
]

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path
    from typing import Self

    from typing_extensions import TypeVar

    from xpuruntime.artifacts.manifest import Artifact
    from xpuruntime.engines.control_builder import Option
    from xpuruntime.engines.model import ModelInfo
    from xpuruntime.engines.native_export.native_config import NativeExporter
    from xpuruntime.evidence.records import Control
    from xpuruntime.policies import Policy
    from xpuruntime.runtime.machine import Machine
    from xpuruntime.runtime.profiler import DeviceRecording

    SettingsT = TypeVar("SettingsT", default=Any)
else:
    from typing import TypeVar

    SettingsT = TypeVar("SettingsT")


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of one engine: a model, one concrete device, and the policy."""

    model: ModelInfo
    device: str
    policy: Policy
    calibration: Any = None
    artifact: Artifact | None = None
    purpose: Literal["run", "compile", "search"] = "run"


class Judgement(msgspec.Struct, Generic[SettingsT], frozen=True, kw_only=True):
    """An engine's answer to a request, made from facts alone."""

    verdict: Verdict
    controls: tuple[Control, ...] = ()
    settings: SettingsT = {}  # type: ignore[assignment]
    uncompilable: str | None = None

    def setting(self, name: str) -> Any:
        """Return one of the settings; ``None`` where the engine has none of that name."""
        if isinstance(self.settings, dict):
            return self.settings.get(name)
        return getattr(self.settings, name, None)


class WorkRecorder(Protocol):
    """Records the work of devices, beside the ranges of the host that the core records."""

    def start(self) -> None:
        """Start. Where this is interrupted, `abandon` it."""

    def stop(self) -> None:
        """Wait for the devices."""

    def abandon(self) -> None:
        """End the recording at whatever point."""

    def added_to(self, recording: DeviceRecording) -> DeviceRecording:
        """Return a recording of the core's with what devices did."""
        ...


class Engine(ABC, Generic[SettingsT]):
    """An inference engine. Stateless; importing its module must not import the vendor's package."""

    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    extra: ClassVar[str | None] = None
    device_kinds: ClassVar[tuple[str, ...] | None] = None
    automatic: ClassVar[bool] = True
    formats: ClassVar[tuple[str, ...]] = ("onnx",)
    compiles: ClassVar[bool] = False
    runtime_keys: ClassVar[tuple[str, ...]] = ()
    library_files: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def probe(self) -> EngineFacts:
        """Say what is installed and loadable. Never raises."""

    @abstractmethod
    def devices(self, machine: Machine) -> tuple[str, ...]:
        """Return the concrete devices this engine could use on `machine`, best first. Pure."""

    def device_name(self, device: str, machine: Machine) -> str | None:
        """Return the vendor's name of a device that is neither a CPU nor a CUDA device, where it is known. Pure."""
        del device, machine
        return None

    @abstractmethod
    def judge(self, request: Request, machine: Machine) -> Judgement[SettingsT]:
        """Accept or reject, with the enforceability of every policy key. Pure: reads facts, touches no device."""

    @abstractmethod
    def load(self, request: Request, judgement: Judgement[SettingsT], machine: Machine) -> LoadedModel:
        """Load the model. Slow; raises an `XpuRuntimeError` and leaves nothing behind when it fails."""

    def compares_nodes(self, judgement: Judgement[SettingsT]) -> bool:
        """Say whether `load` has each node of the model's own graph compared with its schema, as the ONNX checker does.

        Pure. Such a check is not made before. It is where this is false, the default, or where `load` fails.
        """
        del judgement
        return False

    def exporter(self) -> type[NativeExporter] | None:
        """Return what writes sessions of this engine as native configuration, or ``None``, the default."""
        return None

    def option_table(self, device: str) -> Mapping[str, Option]:
        """Return the options that ``execution.provider_options`` may give this engine on a device. Pure."""
        del device
        return {}

    def read(self, model: Any, example_inputs: Any, *, trust: bool) -> ModelInfo | None:
        """Return what is known of a model of a format that is this engine's own; ``None``, the default, for any other.

        ONNX models are no engine's own. `trust` allows a file that can run code of its own.
        """
        del model, example_inputs, trust
        return None

    def as_onnx(self, model: ModelInfo) -> tuple[ModelInfo, Callable[[LoadedModel], LoadedModel]] | None:
        """Return the ONNX graph in a model of this engine's own format, and what makes a loaded one take its inputs.

        Results are then compared with those of that graph on ONNX Runtime. ``None``, the default, where there is none.
        """
        del model
        return None

    def operator_schemas(self) -> Sequence[Any]:
        """Return the schemas of operators of its own, as ONNX Runtime tells them. Empty by default."""
        return ()

    def operator_options(self, options: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return those of ``execution.provider_options`` without which a model has no operators, under this name."""
        del options
        return {}

    def device_recorder(self, limit: int) -> WorkRecorder | None:
        """Return what records the work of devices in place of the core; ``None``, the default, where nothing has to.

        The package of an engine that takes CUPTI for itself, such as PyTorch's profiler, has to be asked while it is
        loaded. Raises `InputError` where it cannot be asked now.
        """
        del limit
        return None

    def tunables(self, model: ModelInfo, device: str, machine: Machine) -> tuple[Tunable, ...]:
        """Return the settings that a tuner may search for a model on a device. Pure.

        By default those of the policy that any engine may take on such a device, and the options of `option_table` that
        state values to search. What this engine refuses of them need not be left out: each candidate is planned first.
        """
        del model, machine
        return (*of_policy(device), *of_options(self.name, self.option_table(device)))

    def target(self, request: Request, judgement: Judgement[SettingsT], machine: Machine) -> dict[str, str]:
        """Return what a compiled artifact of this request is tied to: versions of engine and libraries, chip, device.

        Pure. An artifact is loaded only where every entry is the same as when it was made: leave out what does not
        matter, such as the index of a device, and take what a compilation ahead of time aims at from the policy, so
        that it is the same on the machine that compiles and on the one that runs.
        """
        raise _nothing_to_compile(self.name, request, judgement, machine)

    def compile(self, request: Request, judgement: Judgement[SettingsT], machine: Machine, folder: Path) -> Compiled:
        """Write the compiled model into an empty folder that exists. Slow."""
        raise _nothing_to_compile(self.name, request, judgement, machine, folder)


def _nothing_to_compile(engine: str, *_: Any) -> UnsupportedOperationError:
    return UnsupportedOperationError(
        f"the engine {engine} makes no compiled artifact; load the model itself, or name an engine that does",
        engine=engine,
    )


class Refusal(msgspec.Struct, frozen=True):
    """A verdict's code, its reason, and the fix."""

    code: VerdictCode
    reason: str
    fix: str | None = None

    def verdict(self, engine: str, device: str) -> Verdict:
        """Return the verdict on this engine on this device."""
        candidate = f"{engine}@{device}"
        return Verdict(candidate=candidate, accepted=False, code=self.code, reason=self.reason, fix=self.fix)

    def judgement(self, engine: str, device: str) -> Judgement:
        """Return the answer to a request for this engine on this device."""
        return Judgement(verdict=self.verdict(engine, device))


class Resolved(msgspec.Struct, Generic[SettingsT], frozen=True):
    """A policy as an engine takes it: settings, what becomes of each key, and a sentence for the verdict."""

    settings: SettingsT
    controls: tuple[Control, ...]
    reason: str
    uncompilable: str | None = None


class PackagedEngine(Engine[SettingsT]):
    """An engine of a package: its `judge` looks for the device and the package, then asks `refuse` and `resolve`."""

    #: Name of the product, in sentences.
    title: ClassVar[str]
    #: The devices, in words.
    runs_on: ClassVar[str]
    #: Why there is no such engine, and what installs it in place of `extra`.
    absent: ClassVar[str]
    install: ClassVar[str | None] = None

    def judge(self, request: Request, machine: Machine) -> Judgement[SettingsT]:
        """Accept or reject from facts; see `Engine.judge`."""
        try:
            refusal = self.refuse_device(request, machine) or self.refuse_package(machine)
            refusal = refusal or self.refuse(request, machine)
            resolution = refusal or self.resolve(request, machine)
        except PolicyError as error:
            resolution = Refusal(VerdictCode.OPTION_INVALID, error.reason, error.fix)
        if isinstance(resolution, Refusal):
            return resolution.judgement(self.name, request.device)
        return Judgement(
            verdict=Verdict(
                candidate=f"{self.name}@{request.device}",
                accepted=True,
                code=VerdictCode.ACCEPTED,
                reason=resolution.reason,
            ),
            controls=resolution.controls,
            settings=resolution.settings,
            uncompilable=resolution.uncompilable,
        )

    def not_installed(self) -> EngineFacts:
        """Return what `probe` says where the package is missing."""
        return EngineFacts(name=self.name, reason=self.absent, fix=self.install or install_command(self.extra or ""))

    def refuse_device(self, request: Request, machine: Machine) -> Refusal | None:
        """Refuse a device that it never has, or that is missing. Pure; the package may be missing."""
        kind = request.device.partition(":")[0]
        if kind not in (self.device_kinds or ()):
            reason = f"{self.title} has no device {request.device!r}; it runs on {self.runs_on}"
            return Refusal(VerdictCode.DEVICE_UNSUPPORTED, reason)
        return missing_cuda_device(request.device, machine) if kind == "cuda" else None

    def refuse_package(self, machine: Machine) -> Refusal | None:
        """Refuse where the package is missing or broken. Pure."""
        facts = machine.engines.get(self.name)
        if facts is None or facts.version is None:
            missing = self.not_installed()
            reason, fix = (None, None) if facts is None else (facts.reason, facts.fix)
            return Refusal(VerdictCode.ENGINE_MISSING, reason or missing.reason or "", fix or missing.fix)
        if not facts.loadable:
            return Refusal(VerdictCode.ENGINE_BROKEN, facts.reason or f"{self.title} does not import", facts.fix)
        return None

    @abstractmethod
    def refuse(self, request: Request, machine: Machine) -> Refusal | None:
        """Refuse what it cannot run, or runs wrongly. The package is there. Pure."""

    @abstractmethod
    def resolve(self, request: Request, machine: Machine) -> Resolved[SettingsT]:
        """Return what it is loaded with; raises `PolicyError` for an option that it does not take. Pure."""


def missing_cuda_device(device: str, machine: Machine) -> Refusal | None:
    """Refuse a CUDA device that is not on this machine; ``"cuda"`` is the first one."""
    if not machine.cuda:
        reason, _, fix = (machine.cuda_reason or "no CUDA device").partition(". Fix: ")
        return Refusal(VerdictCode.DEVICE_MISSING, f"{device} was not found: {reason}", fix or None)
    if int(device.partition(":")[2] or 0) not in {gpu.index for gpu in machine.cuda}:
        have = ", ".join(f"cuda:{gpu.index}" for gpu in machine.cuda)
        return Refusal(VerdictCode.DEVICE_MISSING, f"{device} was not found: this machine has {have}")
    return None


_PRECISIONS = ("model", "fp32", "tf32", "fp16", "bf16", "int8")


class Tunable(msgspec.Struct, frozen=True, kw_only=True):
    """A setting that can be searched."""

    key: str
    values: tuple[Any, ...]
    needs: dict[str, tuple[Any, ...]] = {}
    first: bool = False


def of_policy(device: str) -> tuple[Tunable, ...]:
    """Return the keys of a policy that may be searched on a device, whatever the engine. A plan says what it takes."""
    kind = device.partition(":")[0]
    tunables = [Tunable(key="execution.precision", values=_PRECISIONS)]
    if kind == "cpu":
        from xpuruntime.runtime.cpu_and_memory import cpu_cores

        cores = cpu_cores()
        tunables.append(Tunable(key="execution.threads", values=(None, 1, cores.physical, cores.logical)))
    if kind == "cuda":
        tunables.append(Tunable(key="execution.cuda_graph", values=("off", "require")))
        tunables.append(Tunable(key="execution.layout", values=("auto", "nhwc")))
    return tuple(tunables)


def of_options(engine: str, table: Mapping[str, Option]) -> tuple[Tunable, ...]:
    """Return the options of a table that state values to search."""
    prefix = f"execution.provider_options.{engine}."
    return tuple(
        Tunable(
            key=prefix + name,
            values=(None, *option.search),
            needs={prefix + other: values for other, values in option.needs.items()},
            first=option.search_first,
        )
        for name, option in table.items()
        if option.search and option.owned_by is None
    )


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Immutable, hashable value: what one engine is loaded with, in the engine's own terms.

    Members that are dicts are frozen too. Equal requests give equal settings.
    """

    def __post_init__(self) -> None:
        """Freeze the members that are dicts, apart from what the caller passed."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if type(value) is dict:
                msgspec.structs.force_setattr(self, name, _FrozenOptions(value))

    def replace(self, **changes: Any) -> Self:
        """Return the same settings with other values for some members."""
        return msgspec.structs.replace(self, **changes)


class _FrozenOptions(FrozenDict):
    __slots__ = ()
    OWNER: ClassVar[str] = "an engine's settings"
    FIX: ClassVar[str] = "use settings.replace(...)"


class Recipe(NamedTuple):
    """All that loading or compiling needs. The judgement is the engine's own, of this request."""

    engine: Engine
    request: Request
    judgement: Judgement
    machine: Machine


def judge(engine: Engine, request: Request, machine: Machine) -> Judgement:
    """Return the answer of an engine; where a plugin fails to give one, that it is broken, and why."""

    def failed(reason: str) -> Judgement:
        told = f"its plugin failed to judge the request: {reason}"
        fix = "upgrade or uninstall the package that the plugin is of"
        return Refusal(VerdictCode.ENGINE_BROKEN, told, fix).judgement(engine.name, request.device)

    def call() -> Judgement:
        judgement = engine.judge(request, machine)
        if not isinstance(judgement, Judgement):
            raise TypeError(f"judge() returned an object of type {type(judgement).__name__}, not Judgement")
        return judgement

    return guarded(engine, call, failed)


class Compiled(msgspec.Struct, frozen=True, kw_only=True):
    """What `Engine.compile` wrote into its folder."""

    files: tuple[str, ...]
    node_map: dict[str, tuple[str, ...]] = {}
    notes: tuple[str, ...] = ()
