# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Diagnosis for ``xrt doctor``, in a process of its own: a library that ends it as it is imported is a finding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.errors import InputError
from xpuruntime.runtime.doctor.diagnosis import Diagnosis, diagnose, examine
from xpuruntime.runtime.doctor.facts import TorchFacts, gather
from xpuruntime.runtime.machine import EngineFacts
from xpuruntime.runtime.snapshot import core_problem, machine_snapshot
from xpuruntime.runtime.worker import FailureKind, Worker, WorkerFailure

if TYPE_CHECKING:
    from xpuruntime.runtime.doctor.facts import Package

#: Seconds until what is imported is taken to hang.
_SECONDS = 120.0


def diagnosis_apart() -> Diagnosis:
    """Return the diagnosis of this machine, whatever becomes of a process that imports the engines."""
    try:
        return msgspec.convert(_call("diagnosis"), Diagnosis)
    except InputError:  # there is no interpreter to start, as in a program that embeds Python
        return msgspec.convert(diagnosis(), Diagnosis)
    except WorkerFailure:
        return _one_by_one()


def diagnosis() -> Any:
    """Return the diagnosis, made in this process, as plain values."""
    from xpuruntime.engines.registry import default_registry

    load_kernels()
    route = torch_route()
    return msgspec.to_builtins(
        diagnose(default_registry().engines(), torch=None if route is None else msgspec.convert(route, TorchFacts))
    )


def load_kernels() -> None:
    """Load the plugins with kernels, where the core can be imported."""
    if core_problem() is None:
        from xpuruntime.ops.call_context import prepare

        prepare()


def torch_route() -> Any:
    """Return PyTorch's facts as plain values."""
    from xpuruntime.engines.torch.names import torch_facts

    return msgspec.to_builtins(torch_facts())


def engine_facts(name: str) -> Any:
    """Return what a probe of one engine finds, as plain values."""
    from xpuruntime.engines.registry import default_registry

    machine = machine_snapshot({name: default_registry().engines()[name]})
    return msgspec.to_builtins(machine.engines[name])


def _call(function: str, **arguments: Any) -> Any:
    with Worker(timeout=_SECONDS) as worker:
        return worker.call(f"{__name__}:{function}", **arguments)


def _one_by_one() -> Diagnosis:
    """Return the diagnosis where something ends the process: each engine is probed in one of its own."""
    from xpuruntime.engines.registry import default_registry

    by_name: dict[str, EngineFacts] = {}
    for name in default_registry().engines():
        try:
            by_name[name] = msgspec.convert(_call("engine_facts", name=name), EngineFacts)
        except WorkerFailure as failure:
            by_name[name] = EngineFacts(name=name, reason=_ended(f"probing {name}", failure))
    plugins: tuple[str, ...] = ()
    torch: TorchFacts | None = None
    try:
        _call("load_kernels")
    except WorkerFailure as failure:
        plugins = (_ended("loading plugins with kernels", failure),)
    try:
        torch = msgspec.convert(_call("torch_route"), TorchFacts | None)
    except WorkerFailure as failure:
        by_name["torch"] = EngineFacts(name="torch", reason=_ended("importing torch", failure))
    facts = gather(machine_snapshot().with_engines(by_name), core_error=core_problem(), torch=torch)
    engines = {name: _with_package(engine, facts.packages) for name, engine in by_name.items()}
    return examine(
        msgspec.structs.replace(facts, machine=facts.machine.with_engines(engines), plugins=(*facts.plugins, *plugins))
    )


def _ended(what: str, failure: WorkerFailure) -> str:
    if failure.signal is not None:
        return f"{what} ends the process by {failure.signal}"
    if failure.exit_code is not None:
        return f"{what} ends the process with exit status {failure.exit_code}"
    if failure.kind is FailureKind.TIMEOUT:
        return f"{what} does not end within {_SECONDS:.0f} s"
    return f"{what} fails: {failure.error or failure.reason}"


def _with_package(facts: EngineFacts, packages: tuple[Package, ...]) -> EngineFacts:
    """Return the facts of an engine whose probe ended the process with the package that brings it, and what to do."""
    from xpuruntime.lockfile.engine_dependencies import packages_of

    if facts.loadable or facts.version is not None or facts.fix is not None:
        return facts
    names = packages_of(facts.name)
    package = next((candidate for name in names for candidate in packages if candidate.name == name), None)
    fix = f"python -m pip install --force-reinstall {facts.name if package is None else package.name}"
    return msgspec.structs.replace(facts, version="?" if package is None else package.version, fix=fix)
