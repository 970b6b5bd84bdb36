# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Engine`: the interface of an inference engine, with what it is asked and what it answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal

import msgspec

from xpuruntime.engines.loaded_model import Binding, LoadedModel, Observed, closed
from xpuruntime.engines.tunables import Tunable, of_options, of_policy
from xpuruntime.errors import UnsupportedOperationError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from typing_extensions import TypeVar

    from xpuruntime.artifacts.manifest import Artifact
    from xpuruntime.engines.compiled import Compiled
    from xpuruntime.engines.model import ModelInfo
    from xpuruntime.engines.native_export.native_config import NativeExporter
    from xpuruntime.engines.options import Option
    from xpuruntime.evidence.records import Control, Verdict
    from xpuruntime.policies import Policy
    from xpuruntime.runtime.machine import EngineFacts, Machine

    SettingsT = TypeVar("SettingsT", default=Any)
else:
    from typing import TypeVar

    SettingsT = TypeVar("SettingsT")

__all__ = ["Binding", "Engine", "Judgement", "LoadedModel", "Observed", "Request", "closed"]


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

    def exporter(self) -> type[NativeExporter] | None:
        """Return what writes sessions of this engine as native configuration, or ``None``, the default."""
        return None

    def option_table(self, device: str) -> Mapping[str, Option]:
        """Return the options that ``execution.provider_options`` may give this engine on a device. Pure."""
        del device
        return {}

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
