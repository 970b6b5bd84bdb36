# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Models`: the models of one server, behind the interface that the transports use."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from xpuruntime.argument_types import FLAG, SESSIONS, ArgumentType, check_types
from xpuruntime.policies.document import did_you_mean
from xpuruntime.runtime.interruptible_waits import BackgroundCall
from xpuruntime.serving.batching.layout import shape_of
from xpuruntime.serving.messages import ServingError, Status, without_folders
from xpuruntime.serving.models.loading import MemoryBudget
from xpuruntime.serving.models.model_settings import ModelSettings
from xpuruntime.serving.models.settings import ServeSettings
from xpuruntime.serving.models.slot import ModelSlot, stopping
from xpuruntime.serving.monitoring.records import AccessLog, both_logs, request_spans

if TYPE_CHECKING:
    from concurrent.futures import Future

    from xpuruntime.engines.registry import EngineRegistry
    from xpuruntime.inference.session import InferenceSession
    from xpuruntime.serving.batching.layout import InputLayout, OutputLayout
    from xpuruntime.serving.messages import InferRequest, InferResponse, Parameter
    from xpuruntime.serving.models.version import ServedVersion
    from xpuruntime.serving.monitoring.records import RequestLog


def memory_usage_of(device: str, size: int) -> dict[str, Any]:
    """Return an entry of ``memory_usage`` in the statistics, whose types Triton calls CPU and GPU."""
    kind, _, number = device.partition(":")
    return {"type": "GPU" if kind in ("cuda", "rocm") else kind.upper(), "id": int(number or 0), "byte_size": size}


def _tensor(layout: InputLayout | OutputLayout) -> dict[str, Any]:
    return {"name": layout.name, "datatype": layout.datatype, "shape": shape_of(layout.dims or ())}


def _config(layout: InputLayout | OutputLayout, most: int) -> dict[str, Any]:
    dims = shape_of(layout.dims or ())
    if most and layout.batch is not None:
        del dims[layout.batch]
    word = "STRING" if layout.datatype == "BYTES" else layout.datatype
    return {"name": layout.name, "data_type": f"TYPE_{word}", "dims": dims}


#: Extensions of the protocol that the models support; a server adds those of its transports.
EXTENSIONS = (
    "statistics", "model_repository", "model_configuration", "schedule_policy", "parameters", "xpuruntime_evidence",
)  # fmt: skip


#: Looks at the versions that a request makes while they are exchanged.
_LOOKS = 16

_SETTINGS = ArgumentType("ServeSettings", lambda value: isinstance(value, ServeSettings))


class Models:
    """The models of one server; implements `ModelService`.

    Parameters
    ----------
    settings : ServeSettings
    sessions : mapping of str to InferenceSession, optional
        Models that are open already, served under the settings of their name, or without batches.
    registry : EngineRegistry, optional
        Engines to choose from; default: all of this package.
    log : RequestLog, optional
        Called with each request; default: the access log of the settings, if any.
    gc_freeze : bool
        Keep what is loaded out of Python's cyclic garbage collection, by `gc.freeze` for the whole process. A full
        collection holds the lock of the interpreter, for 0.1 to 0.3 s where PyTorch is imported; so does each load.

    Notes
    -----
    `start` loads the models; a model that does not load is not ready, and the others are served.
    """

    def __init__(
        self,
        settings: ServeSettings | None = None,
        sessions: Mapping[str, InferenceSession] | None = None,
        *,
        registry: EngineRegistry | None = None,
        log: RequestLog | None = None,
        gc_freeze: bool = False,
    ) -> None:
        types = {"settings": _SETTINGS, "sessions": SESSIONS, "gc_freeze": FLAG}
        check_types(types, locals(), optional=("settings", "sessions"))
        self.settings = (settings or ServeSettings()).in_folder(Path.cwd())
        self._gc_freeze, self._started = gc_freeze, False
        #: That of the settings, if any.
        self.access_log: AccessLog | None = None
        if log is None and self.settings.access_log is not None:
            self.settings.check_log()
            log = self.access_log = AccessLog(self.settings.access_log)
        spans = request_spans()
        #: Whether requests get spans, and so are to have the trace of their client.
        self.traced = spans is not None
        if spans is not None:
            log = spans if log is None else both_logs(log, spans)
        self._log = log
        self.budget = MemoryBudget(self.settings.memory)
        self._slots: dict[str, ModelSlot] = {}
        self._lock = threading.Lock()
        self._closed = False
        sessions = sessions or {}
        opened = {name: ModelSettings(source=session.model.file) for name, session in sessions.items()}
        for name, model in {**opened, **self.settings.models}.items():
            self._slots[name] = ModelSlot(
                name, model, self.budget, session=sessions.get(name), registry=registry, log=log,
                changed=self._freeze, infer=self.infer,
            )  # fmt: skip

    def start(self) -> None:
        """Load all models that are loaded at the start. Slow; what fails is in `index`."""
        for slot in self._slots.values():
            if slot.settings.load == "startup":
                slot.try_load()
        self._started = True
        self._freeze()

    def close(self, drain: float = 30.0) -> None:
        """Take no request any more, answer those that were accepted within so many seconds, and release all models.

        Where the wait is interrupted, that goes on in a thread; to close again waits for the rest.
        """
        BackgroundCall(lambda: self._close(drain), "xpuruntime-close").result()

    def _close(self, drain: float) -> None:
        with self._lock:
            self._closed = True
        threads = [
            threading.Thread(target=slot.close, args=(drain,), name=f"xpuruntime-close-{name}")
            for name, slot in self._slots.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._gc_freeze:
            gc.unfreeze()
        if self.access_log is not None:
            self.access_log.close()

    def _freeze(self) -> None:
        """Free what was unloaded, and keep the rest out of later collections."""
        if self._gc_freeze and self._started and not self._closed:
            gc.unfreeze()
            gc.collect()
            gc.freeze()

    def __enter__(self) -> Models:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def infer(self, request: InferRequest) -> Future[InferResponse]:
        """Queue a request; see `ModelService.infer`."""
        return cast("Future[InferResponse]", self._infer(request))

    def respond(self, request: InferRequest) -> InferResponse | Future[InferResponse]:
        """Answer a request at once where its model is known to be short and nothing waits, else queue it.

        Raises as `infer`, and what a request that was answered at once failed with. For the thread that received the
        request, which is held up by `inline_below_us` of the model's batching at most; see `Batcher.respond`.
        """
        return self._infer(request, inline=True)

    def _infer(self, request: InferRequest, *, inline: bool = False) -> InferResponse | Future[InferResponse]:
        try:
            if self._closed:
                raise stopping()
            slot = self._slot(request.model)
            for _ in range(_LOOKS):
                version = slot.served.get(request.version)
                if version is None:
                    if (future := slot.wait(request)) is not None:
                        return future
                    continue
                try:
                    result = version.batcher.respond(request) if inline else version.batcher.submit(request)
                except ServingError as error:
                    if error.code is not Status.UNAVAILABLE:
                        version.refused(error)
                        raise
                    time.sleep(0)  # the version was just exchanged: look again
                    continue
                slot.last_used = time.monotonic()
                if isinstance(result, ServingError):
                    raise result
                return result
            raise slot.unavailable()
        except ServingError as error:
            if self._log is not None:
                self._log(request, error, 0.0)
            raise

    def refused(self, request: InferRequest, error: ServingError) -> None:
        """Count and log a request that its transport refused, such as a malformed one.

        Parameters
        ----------
        request : InferRequest
            What is known of it: its model, where that was read, and no inputs.
        error : ServingError
        """
        slot = self._slots.get(request.model)
        version = None if slot is None else slot.served.get(request.version)
        if version is not None:
            version.refused(error)
        if self._log is not None:
            self._log(request, error, 0.0)

    def live(self) -> bool:
        """Return whether the process answers."""
        return True

    def ready(self) -> tuple[bool, str]:
        """Return whether all required models make progress, else why not. One that was unloaded is not waited for."""
        if self._closed:
            return False, "the server is being stopped"
        reasons = []
        for slot in self._slots.values():
            if slot.settings.required and not slot.withdrawn:
                good, reason = slot.ready()
                if not good:
                    reasons.append(reason)
        return not reasons, "; ".join(reasons)

    def model_ready(self, model: str, version: str = "") -> tuple[bool, str]:
        """Return whether one model makes progress, else why not."""
        return self._slot(model).ready(version)

    def failure(self, model: str) -> BaseException | None:
        """Return why the last load of a model failed; ``None`` where it did not, or nothing was loaded yet."""
        return self._slot(model).failure

    def server_metadata(self) -> Mapping[str, Any]:
        """Return ``name``, ``version``, ``extensions``."""
        from xpuruntime import __version__

        return {"name": "xpuruntime", "version": __version__, "extensions": list(EXTENSIONS)}

    def model_metadata(self, model: str, version: str = "") -> Mapping[str, Any]:
        """Return names, datatypes and shapes; see `ModelService.model_metadata`."""
        slot, loaded = self._loaded(model, version)
        return {
            "name": model,
            "versions": [str(number) for number in slot.versions],
            "platform": f"xpuruntime_{loaded.session.plan.engine}",
            "inputs": [_tensor(info) for info in loaded.layout.inputs.values()],
            "outputs": [_tensor(info) for info in loaded.layout.outputs.values()],
        }

    def model_config(self, model: str, version: str = "") -> Mapping[str, Any]:
        """Return the configuration, in Triton's words."""
        slot, loaded = self._loaded(model, version)
        plan, layout, batching = loaded.session.plan, loaded.layout, loaded.batching
        most = batching.max_batch_size
        gpu = plan.device.partition(":")[2] if plan.device.startswith("cuda") else None
        parameters = {
            "xrt_engine": f"{plan.engine}@{loaded.devices}",
            "xrt_precision": plan.precision,
            "xrt_lock": loaded.lock.digest if loaded.lock is not None else "",
            "xrt_shapes": batching.shapes,
            "xrt_queue_delay": batching.queue_delay,
        }
        if loaded.limits is not None:
            parameters["xrt_slo"] = msgspec.json.encode(loaded.limits.to_dict()).decode()
        config: dict[str, Any] = {
            "name": model,
            "platform": f"xpuruntime_{plan.engine}",
            "backend": "xpuruntime",
            "version_policy": {"specific": {"versions": list(slot.versions)}},
            "max_batch_size": most,
            "input": [{**_config(info, most), "optional": not info.required} for info in layout.inputs.values()],
            "output": [_config(info, most) for info in layout.outputs.values()],
            "instance_group": [
                {
                    "name": model,
                    "kind": "KIND_CPU" if gpu is None else "KIND_GPU",
                    "count": loaded.settings.instances,
                    "gpus": []
                    if gpu is None
                    else [int(session.plan.device.partition(":")[2] or 0) for session in loaded.sessions],
                }
            ],
            "parameters": {key: {"string_value": value} for key, value in parameters.items()},
        }
        if most:
            config["dynamic_batching"] = {
                "preferred_batch_size": list(batching.preferred_batch_size),
                "max_queue_delay_microseconds": batching.max_queue_delay_us,
                "preserve_ordering": batching.preserve_ordering,
                "priority_levels": batching.priority_levels,
                "default_priority_level": batching.default_level,
                "default_queue_policy": {
                    "timeout_action": batching.timeout_action.upper(),
                    "default_timeout_microseconds": batching.timeout_us,
                    "allow_timeout_override": True,
                    "max_queue_size": batching.max_queue_size,
                },
            }
        return config

    def statistics(self, model: str = "", version: str = "") -> Mapping[str, Any]:
        """Return ``model_stats`` of the statistics extension."""
        if model:
            slot = self._slot(model)
            versions = [slot.version(version)] if version else list(slot.loaded)
        else:
            versions = [served for slot in self._slots.values() for served in slot.loaded]
        return {"model_stats": [_statistics(served) for served in versions]}

    def evidence(self, model: str, kind: str, version: str = "") -> Mapping[str, Any]:
        """Return the ``plan``, ``evidence`` or ``lock`` of a model, as its JSON form."""
        _, loaded = self._loaded(model, version)
        if kind == "plan":
            return _public(loaded.session.plan.to_dict())
        if kind == "lock":
            if loaded.lock is None:
                raise ServingError(
                    Status.NOT_FOUND,
                    f"model {model!r} is served without a lock. Fix: make one with `xrt lock`, and name it in "
                    "serve.yaml",
                )
            plain: dict[str, Any] = msgspec.to_builtins(loaded.lock)
            return plain
        if kind != "evidence":
            raise ServingError(
                Status.NOT_FOUND, f"there is no {kind!r} of a model{did_you_mean(kind, _KINDS, 'kinds')}"
            )
        return _public(evidence_of(loaded))

    def index(self, ready_only: bool = False) -> Sequence[Mapping[str, Any]]:
        """Return ``name``, ``version``, ``state``, ``reason`` of each model of the repository."""
        return [
            entry
            for slot in self._slots.values()
            for entry in slot.index()
            if not ready_only or entry["state"] == "READY"
        ]

    def load(self, model: str, parameters: Mapping[str, Parameter]) -> None:
        """Load or reload a model; requests that were accepted are answered by the one that accepted them. Slow.

        Raises
        ------
        ServingError
            ``NOT_FOUND``: no such model in the settings. ``UNIMPLEMENTED``: a parameter. ``INVALID_ARGUMENT``: the
            model does not load; the one that was served before is served on.
        """
        _refuse_parameters(parameters, ())
        if self._closed:
            raise ServingError(Status.UNAVAILABLE, "the server is being stopped, and loads no model any more")
        self._slot(model).load()

    def unload(self, model: str, parameters: Mapping[str, Parameter]) -> None:
        """Refuse new requests of a model, answer those that were accepted, then free it."""
        _refuse_parameters(parameters, ("unload_dependents",))
        self._slot(model).unload()

    @property
    def slots(self) -> Mapping[str, ModelSlot]:
        """The models by name."""
        return self._slots

    def _slot(self, model: str) -> ModelSlot:
        slot = self._slots.get(model)
        if slot is None:
            raise ServingError(
                Status.NOT_FOUND, f"no model {model[:128]!r}{did_you_mean(model, self._slots, 'models')}"
            )
        return slot

    def _loaded(self, model: str, version: str) -> tuple[ModelSlot, ServedVersion]:
        slot = self._slot(model)
        return slot, slot.version(version)


def _public(facts: Mapping[str, Any]) -> dict[str, Any]:
    public_facts: dict[str, Any] = without_folders(msgspec.to_builtins(facts))
    return public_facts


_KINDS = ("plan", "evidence", "lock")


def _statistics(loaded: ServedVersion) -> dict[str, Any]:
    return {
        "name": loaded.name,
        "version": str(loaded.version),
        **loaded.statistics.snapshot().plain(),
        "memory_usage": [memory_usage_of(device, size) for device, size in loaded.memory_usage()],
    }


def evidence_of(loaded: ServedVersion) -> dict[str, Any]:
    """Return what is known of a version since it was loaded."""
    plan, counted = loaded.session.plan, loaded.statistics.snapshot()
    watched = loaded.watched()
    report = loaded.reports[0] if loaded.reports else None
    return {
        "schema": "xpuruntime.serving/1",
        "model": loaded.name,
        "version": str(loaded.version),
        "engine": plan.engine,
        "device": plan.device,
        "precision": plan.precision,
        "request_hash": plan.request_hash,
        "execution_hash": plan.execution_hash,
        "lock": loaded.lock.digest if loaded.lock is not None else None,
        "batching": loaded.batching.to_plain(),
        "slo": loaded.limits.to_dict() if loaded.limits is not None else None,
        "warmup": loaded.warmed,
        "memory": loaded.memory,
        "host_memory": loaded.runner.memory,
        "executions": counted.executions,
        "inferences": counted.inferences,
        "devices": [
            {
                "device": session.plan.device,
                "execution_hash": session.plan.execution_hash,
                "executions": executions,
                "rows": rows,
                "report": loaded.reports[index] if loaded.reports else None,
            }
            for index, (session, (executions, rows)) in enumerate(zip(loaded.sessions, loaded.ran, strict=True))
        ],
        "dispatches": counted.reasons,
        "padding_share": counted.padding_share,
        "failures": counted.failures,
        "canary": watched.get("canary"),
        "shadow": watched.get("shadow"),
        "report": report,
        "report_note": None if report is not None else "unobservable: no instrumented copy ran; state evidence: true",
    }


def _refuse_parameters(parameters: Mapping[str, Parameter], known: Sequence[str]) -> None:
    for name in parameters:
        if name not in known:
            raise ServingError(
                Status.UNIMPLEMENTED,
                f"the parameter {name[:64]!r} of the repository extension is not supported. "
                "Fix: state it in serve.yaml",
            )
