# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The interface an inference engine implements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import msgspec

from xpuruntime.errors import XpuRuntimeError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from xpuruntime.engines.model import ModelInfo
    from xpuruntime.evidence.records import Boundary, Control, Conversion, Unit, Verdict
    from xpuruntime.policies import Policy
    from xpuruntime.runtime.machine import EngineFacts, Machine

__all__ = ["Binding", "Engine", "Judgement", "LoadedModel", "Observed", "Request", "closed"]


def closed(*_: Any, **__: Any) -> NoReturn:
    """Refuse a call: what stands in for `run` after `close`.

    Raises
    ------
    XpuRuntimeError
    """
    msg = "this session is closed; open a new InferenceSession"
    raise XpuRuntimeError(msg)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of one engine: a model, one concrete device, and the policy.

    Attributes
    ----------
    model : ModelInfo
    device : str
        One candidate device, concrete: ``"cpu"``, ``"cuda:0"``, ``"npu"``.
    policy : Policy
        Merged: keyword arguments of the session are already in it.
    """

    model: ModelInfo
    device: str
    policy: Policy


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's answer to a request, made from facts alone.

    Attributes
    ----------
    verdict : Verdict
    controls : tuple of Control
        One for each policy key that the policy states.
    settings : dict
        What `load` will hand to the vendor, resolved now so that the plan can show it.
    """

    verdict: Verdict
    controls: tuple[Control, ...] = ()
    settings: dict[str, Any] = {}


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """What an instrumented run saw, before it is compared with the request.

    Attributes
    ----------
    units : tuple of Unit
    boundaries : tuple of Boundary
    effective : dict of str to str
        Policy key to the value read back from the engine, such as ``{"execution.device": "cuda:0"}``. Keys that could
        not be read back are absent: they are reported as unobservable.
    notes : tuple of str
        What could not be observed, and why.
    partial : bool
        Whether the pass broke off or a source of records was missing.
    """

    units: tuple[Unit, ...] = ()
    boundaries: tuple[Boundary, ...] = ()
    effective: dict[str, str] = {}
    notes: tuple[str, ...] = ()
    partial: bool = False


class Binding(ABC):
    """Static input and output buffers of one loaded model; see `InferenceSession.bind`.

    `inputs` and `outputs` map names to the buffers, which keep their addresses: write into the inputs, `run()`, read
    the outputs. `run` takes no arguments and is the hot path.
    """

    inputs: Mapping[str, Any]
    outputs: Mapping[str, Any]
    run: Callable[[], None]
    #: "captured", "off", or the reason why no CUDA graph was captured.
    graph: str

    @abstractmethod
    def close(self) -> None:
        """Release the buffers. Idempotent."""


class LoadedModel(ABC):
    """A model loaded by one engine, ready to run. Safe to call from many threads."""

    @abstractmethod
    def run(self, feeds: Mapping[str, Any], stream: Any = None) -> dict[str, Any]:
        """Return output name to array of the caller's own kind; see `InferenceSession`."""

    def runner(self) -> Callable[..., dict[str, Any]]:
        """Return the hot path: `run`, with as little work a call as the engine can. It keeps the model alive."""
        return self.run

    @abstractmethod
    def bind(self, inputs: Mapping[str, Any] | None, outputs: Mapping[str, Any] | None, stream: Any = None) -> Binding:
        """Fix the buffers; see `InferenceSession.bind`. On the CPU a `stream` is refused."""

    @abstractmethod
    def observe(self, feeds: Mapping[str, Any], runs: int) -> Observed:
        """Run an instrumented copy of the model `runs` times and report what ran. Slow; never on the hot path."""

    @abstractmethod
    def conversions(self) -> Sequence[Conversion]:
        """Return what was converted or copied so far, each with a count."""

    def memory(self) -> dict[str, int]:
        """Return bytes held by owner, such as ``{"weights": ..., "pool": ...}``, as far as the engine tells."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Release everything. Idempotent; running afterwards raises."""


class Engine(ABC):
    """An inference engine. Stateless; importing its module must not import the vendor's package.

    Attributes
    ----------
    name : str
        The word `ExecutionPolicy.engine` uses.
    aliases : tuple of str
    extra : str or None
        The extra of this package that installs it, or ``None`` when it is part of the core.
    automatic : bool
        Whether ``engine: auto`` may choose it. An engine that computes no real answer sets this to ``False`` and runs
        only when it is named.
    """

    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    extra: ClassVar[str | None] = None
    automatic: ClassVar[bool] = True

    @abstractmethod
    def probe(self) -> EngineFacts:
        """Say what is installed and loadable. Never raises."""

    @abstractmethod
    def devices(self, machine: Machine) -> tuple[str, ...]:
        """Return the concrete devices this engine could use on `machine`, best first. Pure."""

    @abstractmethod
    def judge(self, request: Request, machine: Machine) -> Judgement:
        """Accept or reject, with the enforceability of every policy key. Pure: reads facts, touches no device."""

    @abstractmethod
    def load(self, request: Request, judgement: Judgement, machine: Machine) -> LoadedModel:
        """Load the model. Slow; raises an `XpuRuntimeError` and leaves nothing behind when it fails."""
