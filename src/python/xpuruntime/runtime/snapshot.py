# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`machine_snapshot`: this computer as a `Machine` value, and that value to and from JSON."""

from __future__ import annotations

import fnmatch
import importlib
import importlib.util
import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from xpuruntime.errors import InputError
from xpuruntime.files.paths import json_bytes, reason_of, user_path
from xpuruntime.files.reading import decode_json, read_regular
from xpuruntime.runtime.libraries.loading import LibraryIndex, libraries_needed_by, loaded_libraries, with_build_id
from xpuruntime.runtime.machine import CpuFacts, CudaFacts, EngineFacts, Library, Machine
from xpuruntime.runtime.packages import guarded

SCHEMA = "xpuruntime.machine/1"
_MAX_BYTES = 1 << 24


class Probed(Protocol):
    """What a snapshot needs of an engine."""

    @property
    def name(self) -> str:
        """The engine's name."""

    def probe(self) -> EngineFacts:
        """Say what is installed and loadable. Never raises."""


def machine_snapshot(engines: Iterable[Probed] | Mapping[str, Probed] = ()) -> Machine:
    """Take a snapshot of this computer: processor, CUDA devices, and the engines given."""
    known = engines.values() if isinstance(engines, Mapping) else engines
    facts = {engine.name: probed(engine) for engine in known}
    problem = core_problem()
    if problem is not None:
        cpu = CpuFacts(name=platform.processor() or platform.machine(), cores=os.cpu_count() or 1)
        cuda: tuple[CudaFacts, ...] = ()
        reason: str | None = f"the core module cannot be imported: {problem}"
        built = False
    else:
        cpu, cuda, reason, built = _core_facts()
    return Machine(
        system=platform.system(),
        architecture=platform.machine(),
        python=platform.python_version(),
        cpu=cpu,
        cuda=cuda,
        cuda_reason=reason,
        core_cuda=built,
        core=None
        if problem is not None
        else with_build_id(Library(name="xpuruntime/_core", path=str(_core().__file__))),
        engines=facts,
    )


def probed(engine: Probed) -> EngineFacts:
    """Return the facts of an engine; where the probe of a plugin's fails, that it cannot be loaded, and why."""

    def failed(reason: str) -> EngineFacts:
        return EngineFacts(
            name=engine.name,
            version="unknown",
            reason=f"its plugin failed to say what is installed: {reason}",
            fix="upgrade or uninstall the package that the plugin is of",
        )

    def call() -> EngineFacts:
        facts = engine.probe()
        if not isinstance(facts, EngineFacts):
            raise TypeError(f"probe() returned an object of type {type(facts).__name__}, not EngineFacts")
        files = getattr(engine, "library_files", ())
        if not files or facts.version is None or facts.libraries:
            return facts
        libraries, cuda_libraries = package_libraries(files, cuda=has_cuda())
        return msgspec.structs.replace(facts, libraries=libraries, cuda_libraries=cuda_libraries)

    return guarded(engine, call, failed)


def core_problem() -> str | None:
    """Return why the core module cannot be imported, or ``None`` when it can."""
    try:
        _core()
    except ImportError as error:
        return str(error)
    return None


def machine_to_json(machine: Machine, *, indent: int = 2) -> str:
    """Return a machine as JSON text, for `machine_from_json`."""
    plain = {"schema": SCHEMA, **msgspec.to_builtins(machine)}
    return msgspec.json.format(json_bytes(plain), indent=indent).decode()


def machine_from_json(text: str | bytes) -> Machine:
    """Read a machine from the text that `machine_to_json` or ``xrt devices --json`` wrote."""
    try:
        plain = decode_json(text)
        if not isinstance(plain, dict):
            raise InputError(
                f"a machine is a JSON object, this is {type(plain).__name__}", fix=f"make one with {_MAKE}"
            )
        schema = plain.pop("schema", None)
        if schema != SCHEMA:
            raise InputError(f"the schema is {schema!r}, a machine has {SCHEMA!r}", fix=f"make one with {_MAKE}")
        return msgspec.convert(plain, Machine)
    except msgspec.MsgspecError as error:
        raise InputError(f"this is not a machine: {error}", fix=f"make one with {_MAKE}") from error


def load_machine(path: str | Path) -> Machine:
    """Read a machine from a file."""
    try:
        text = read_regular(user_path(path, "the machine"), _MAX_BYTES)
    except OSError as error:
        msg = f"cannot read the machine file {path}: {reason_of(error)}"
        raise InputError(msg, fix=f"make one with {_MAKE}") from error
    try:
        return machine_from_json(text)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


_MAKE = "`xrt devices --json > machine.json`"


def _core() -> Any:
    return importlib.import_module("xpuruntime._core")


def has_cuda() -> bool:
    """Say whether this machine has a CUDA device that the core sees."""
    return core_problem() is None and len(_core().DeviceManager.instance().get_all_devices()) > 1


def _core_facts() -> tuple[CpuFacts, tuple[CudaFacts, ...], str | None, bool]:
    manager = _core().DeviceManager.instance()
    cpu, *others = manager.get_all_devices()
    facts = CpuFacts(name=cpu.name, cores=cpu.cores, features=tuple(cpu.features), total_memory=cpu.total_memory)
    cuda = tuple(
        CudaFacts(
            index=device.index,
            name=device.name,
            compute_capability=tuple(device.compute_capability),
            total_memory=device.total_memory,
            sm_count=device.sm_count,
            driver_version=tuple(device.driver_version),
            runtime_version=tuple(device.runtime_version),
            pci_id=device.pci_id,
            dtypes=tuple(device.dtypes),
        )
        for device in others
    )
    return facts, cuda, manager.cuda_reason() or None, bool(manager.built_with_cuda())


def package_libraries(patterns: Sequence[str], *, cuda: bool) -> tuple[tuple[Library, ...], tuple[Library, ...]]:
    """Return the shared libraries of a package and the libraries of CUDA that they need. Imports and loads nothing."""
    own: dict[str, Library] = {}
    for pattern in patterns:
        package, *below, files = pattern.split("/")
        for folder in _folders(package):
            inside = os.path.join(folder, *below)  # noqa: PTH118 - on the way to every session
            try:
                names = os.listdir(inside)  # noqa: PTH208
            except OSError:
                continue
            for name in sorted(fnmatch.filter(names, files)):
                path = os.path.join(inside, name)  # noqa: PTH118
                if os.path.isfile(path):  # noqa: PTH113
                    version = re.search(r"\.so\.(\d[\d.]*)$", name)
                    library = Library(name=name, path=path, version=version[1] if version else None, origin="package")
                    own.setdefault(name, with_build_id(library))
    return tuple(own[name] for name in sorted(own)), _cuda_libraries(own) if cuda else ()


def _folders(package: str) -> list[str]:
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return []
    return list(spec.submodule_search_locations or ()) if spec is not None else []


def _cuda_libraries(own: dict[str, Library]) -> tuple[Library, ...]:
    index: LibraryIndex | None = None
    loaded = {library.name: library for library in loaded_libraries()}
    libraries: dict[str, Library] = {}
    seen = set(own)
    paths = [library.path for library in own.values()]
    while paths:
        try:
            linked, later = libraries_needed_by(paths.pop())
        except InputError:
            continue
        for soname in (*linked, *later):
            if soname in seen:
                continue
            seen.add(soname)
            library = next(
                (library for name, library in loaded.items() if name == soname or name.startswith(soname + ".")), None
            )
            if library is None:
                index = index or LibraryIndex()
                library = next(iter(index.find_soname(soname)), None)
            if library is not None:
                libraries[soname] = with_build_id(library)
                paths.append(library.path)
    return tuple(libraries[soname] for soname in sorted(libraries))
