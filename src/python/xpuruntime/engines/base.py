# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The interface an inference engine implements."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, NoReturn

import msgspec

from xpuruntime.engines.run_threads import RunFuture, RunThreads
from xpuruntime.engines.tunables import Tunable, of_options, of_policy
from xpuruntime.errors import UnsupportedOperationError, XpuRuntimeError
from xpuruntime.runtime.forking import keep_in_child
from xpuruntime.runtime.instrumented_calls import instrumented_method

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from typing_extensions import Self, TypeVar

    from xpuruntime.artifacts.manifest import Artifact
    from xpuruntime.engines.compiled import Compiled
    from xpuruntime.engines.host_runner import HostRunner
    from xpuruntime.engines.model import ModelInfo
    from xpuruntime.engines.native_export.native_config import NativeExporter
    from xpuruntime.engines.options import Option
    from xpuruntime.engines.run_threads import QueueLimits
    from xpuruntime.evidence.kernels.decisions import KernelDecision
    from xpuruntime.evidence.records import Boundary, Control, Conversion, KeySeen, Unit, Verdict
    from xpuruntime.evidence.sections.memory_over_time import LiveBytes
    from xpuruntime.policies import Policy
    from xpuruntime.runtime.machine import EngineFacts, Machine

    SettingsT = TypeVar("SettingsT", default=Any)
else:
    from typing import TypeVar

    SettingsT = TypeVar("SettingsT")

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
    calibration : Calibration or None
        The inputs that the session was given to quantise with.
    artifact : Artifact or None
        Set when a compiled artifact is loaded: already checked against `Engine.target`.
    purpose : {"run", "compile"}
        ``"compile"`` when an artifact is to be made and nothing will run here: the device may then be one that this
        machine lacks, where the engine compiles ahead of time.
    """

    model: ModelInfo
    device: str
    policy: Policy
    calibration: Any = None
    artifact: Artifact | None = None
    purpose: Literal["run", "compile"] = "run"


class Judgement(msgspec.Struct, Generic[SettingsT], frozen=True, kw_only=True):
    """An engine's answer to a request, made from facts alone.

    Attributes
    ----------
    verdict : Verdict
    controls : tuple of Control
        One for each policy key that the policy states.
    settings : struct or dict
        What `load` will hand to the vendor, resolved now so that the plan can show it: a type of the engine's own,
        best an immutable `EngineSettings`, which `load`, `target` and `compile` get as it is. A member ``computes`` is
        a precision, such as ``"fp16"``, where the engine computes tensors of the model in another one than their own:
        the loaded model is then compared with fp32 on the CPU.
    uncompilable : str or None
        Why this request cannot be compiled, although the engine compiles others; `Engine.compile` refuses it too.
    """

    verdict: Verdict
    controls: tuple[Control, ...] = ()
    settings: SettingsT = {}  # type: ignore[assignment]
    uncompilable: str | None = None

    def setting(self, name: str) -> Any:
        """Return one of the settings; ``None`` where the engine has none of that name."""
        if isinstance(self.settings, dict):
            return self.settings.get(name)
        return getattr(self.settings, name, None)


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
    keys : dict of str to KeySeen
        Policy keys that the engine itself has compared, where it knows more than its units tell.
    run_us : tuple of float
        Wall time of each counted instrumented run in microseconds; empty where it was not taken.
    units_us : tuple of float
        What all units together took of each of these runs, or, where only means are known, of a mean one; empty where
        the units have no wall times.
    outside_us : dict of str to float
        What was measured of a run outside of its units, microseconds: ``"call"`` for what a run costs before its first
        unit and after its last, ``"between"`` for what goes by between units.
    cut_us : float
        How much more than `units_us` the units may have taken of a run, because the engine counts whole microseconds
        and cuts off the rest; 0 where it counts finely, or nobody knows.
    decisions : tuple of KernelDecision
        Which xpuruntime kernels were considered for the calls of the pass, and of no others.
    live : tuple of LiveBytes
        What the tensors between units occupy around each unit, as `live_bytes` gives it; empty where the engine does
        not tell their sizes.
    """

    units: tuple[Unit, ...] = ()
    boundaries: tuple[Boundary, ...] = ()
    effective: dict[str, str] = {}
    notes: tuple[str, ...] = ()
    partial: bool = False
    keys: dict[str, KeySeen] = {}
    run_us: tuple[float, ...] = ()
    units_us: tuple[float, ...] = ()
    outside_us: dict[str, float] = {}
    cut_us: float = 0.0
    decisions: tuple[KernelDecision, ...] = ()
    live: tuple[LiveBytes, ...] = ()


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


_THREADS = 4


class LoadedModel(ABC):
    """A model loaded by one engine, ready to run. Safe to call from many threads."""

    _threads: RunThreads | None = None
    #: Whether this is a child of the process that loaded the model: threads of the engine are missing, and the native
    #: model is never ended.
    forked: bool = False

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Make a model that children of this process keep."""
        made = super().__new__(cls)
        keep_in_child(made)
        return made

    @abstractmethod
    def run(self, feeds: Mapping[str, Any], stream: Any = None) -> dict[str, Any]:
        """Return output name to array of the caller's own kind; see `InferenceSession`."""

    def runner(self) -> Callable[..., dict[str, Any]]:
        """Return the hot path: `run`, with as little work a call as the engine can. It keeps the model alive."""
        return self.run

    def host_runner(self) -> HostRunner | None:
        """Return what runs arrays of the host for a server, or ``None`` where `run` does it as well."""
        return None

    def run_async(
        self, feeds: Mapping[str, Any], stream: Any = None, *, limits: QueueLimits | None = None
    ) -> Future[dict[str, Any]]:
        """Start a run and return at once; see `InferenceSession.run_async`.

        By default, `run` is called by a few threads of the model. Arrays on a device are run by the calling thread, and
        the future is done at once: there `run` only queues the work, in the order of the caller's stream.
        """
        if stream is not None or _on_device(feeds):
            done: Future[dict[str, Any]] = RunFuture()
            done.set_running_or_notify_cancel()
            try:
                done.set_result(instrumented_method(self, "run")(feeds, stream))
            except Exception as error:
                if self._threads is not None and self._threads.closed:
                    closed()
                done.set_exception(error)
            return done
        threads = self.run_threads(max(1, min(_THREADS, os.cpu_count() or 1)))
        given = dict(feeds) if hasattr(feeds, "keys") else feeds
        return threads.submit(instrumented_method(self, "run"), given, limits=limits)

    def run_threads(self, count: int) -> RunThreads:
        """Return the threads that run this model asynchronously; the first call says how many, at most."""
        found = self._threads
        return self.__dict__.setdefault("_threads", RunThreads(count)) if found is None else found

    def why_not_in_child(self) -> str | None:
        """Return why the model cannot run in a child of the process that loaded it, and what to do, or ``None``."""
        return None

    def stop_async(self, caller: int | None = None) -> None:
        """Cancel the asynchronous runs that have not begun, and wait for those that have. Called before `close`.

        Parameters
        ----------
        caller : int, optional
            The thread that closes the model, by its ident: its run is not awaited. Default: the calling thread.
        """
        self.run_threads(1).close(caller)  # also where there are none yet, so that none are made any more

    @abstractmethod
    def bind(self, inputs: Mapping[str, Any] | None, outputs: Mapping[str, Any] | None, stream: Any = None) -> Binding:
        """Fix the buffers; see `InferenceSession.bind`. On the CPU a `stream` is refused."""

    @abstractmethod
    def observe(self, feeds: Mapping[str, Any], runs: int) -> Observed:
        """Run an instrumented copy of the model `runs` times and report what ran. Slow; never on the hot path.

        Call `xpuruntime.evidence.checkpoints.checkpoint` when the copy is loaded, after its cold run and after its
        counted runs: the report then shows the memory that was held at each.
        """

    def intermediates(self, feeds: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any] | None:
        """Run once and return tensors inside of the model by name; see `InferenceSession.intermediates`.

        ``None``, the default, where they can only be had by loading the model with more outputs.
        """
        del feeds, names
        return None

    def whole_batch(self, feeds: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return inputs as the engine itself gets them: padded where the policy states ``execution.static_batch``."""
        return feeds

    @abstractmethod
    def conversions(self) -> Sequence[Conversion]:
        """Return what was converted or copied so far, each with a count."""

    def memory(self) -> dict[str, int]:
        """Return bytes held by owner, such as ``{"weights": ..., "pool": ...}``, as far as the engine tells."""
        return {}

    def graph_refusal(self) -> str | None:
        """Return why the engine loaded the model without CUDA graphs although the policy prefers one, or ``None``."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Release everything. Idempotent; running afterwards raises. Called in a thread of its own."""

    def restore_thread(self) -> None:
        """Undo, after `close`, what opening the model changed in the calling thread alone. Nothing by default."""
        return


def _on_device(feeds: Mapping[str, Any]) -> bool:
    """Whether an input is an array on a device other than the CPU."""
    if not hasattr(feeds, "values"):
        return False
    try:
        return any(
            hasattr(one, "__dlpack_device__") and int(one.__dlpack_device__()[0]) not in _HOST for one in feeds.values()
        )
    except Exception:  # of the caller's own class: `run` says what is wrong with it
        return False


#: DLPack's numbers of memory that the CPU reads: its own, and pinned memory of CUDA and ROCm.
_HOST = (1, 3, 11)


class Engine(ABC, Generic[SettingsT]):
    """An inference engine. Stateless; importing its module must not import the vendor's package.

    Attributes
    ----------
    name : str
        The word `ExecutionPolicy.engine` uses.
    aliases : tuple of str
    extra : str or None
        The extra of this package that installs it, or ``None`` when it is part of the core.
    device_kinds : tuple of str or None
        The kinds of device that it drives on any machine, such as ``("cpu", "cuda")``: a fix names this engine for
        these alone. ``None`` where only `devices` knows.
    automatic : bool
        Whether ``engine: auto`` may choose it. An engine that computes no real answer sets this to ``False`` and runs
        only when it is named.
    formats : tuple of str
        The `ModelInfo.format` of the models it takes; others are rejected before it is asked.
    compiles : bool
        Whether `compile` makes an artifact that `load` can start from.
    runtime_keys : tuple of str
        Policy keys that say how a compiled artifact is run and change nothing in it, beside those of the plan itself
        (engine, device, fallback, artifacts, accuracy, mode). All other keys must be the same when it is loaded as
        when it was made. A key stands for all below it.
    library_files : tuple of str
        The shared libraries of its package: the name of a top-level package and a shell pattern of files in it, such
        as ``"onnxruntime/capi/*.so*"``. Their builds are part of `Plan.execution_hash`.
    """

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
        """Write the compiled model into an empty folder that exists. Slow.

        Raises
        ------
        UnsupportedOperationError
            The engine has nothing to compile.
        XpuRuntimeError
            The compilation failed; what was written is thrown away by the caller.
        """
        raise _nothing_to_compile(self.name, request, judgement, machine, folder)


def _nothing_to_compile(engine: str, *_: Any) -> UnsupportedOperationError:
    return UnsupportedOperationError(
        f"the engine {engine} makes no compiled artifact; load the model itself, or name an engine that does",
        engine=engine,
    )
