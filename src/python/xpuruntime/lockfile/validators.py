# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Validators of a lock: facts that its entries depend on, collected when it is made and compared when it is used."""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xpuruntime.errors import InputError
from xpuruntime.evidence.difference import Difference
from xpuruntime.lockfile.consistency import model_facts
from xpuruntime.lockfile.drift import DriftCode, ValidatorKind, shown
from xpuruntime.lockfile.engine_dependencies import (
    CORE,
    OWN_KERNELS,
    PRELOAD,
    compiler_packages,
    compilers_of,
    is_plugin,
    libraries_of,
    packages_of,
    preloaded_libraries,
    quantizer_packages,
    setting_text,
    settings_of,
    variables_of,
    with_thread_counts,
)
from xpuruntime.lockfile.records import Identity, LockedModel, Validator, stable_id
from xpuruntime.ops.torch_kernels import (
    CANARY_VARIABLE,
    adapter_facts,
    canary_facts,
    distribution_facts,
    packages_of_kernel,
    source_of,
)
from xpuruntime.policies.kernel_rules import SOURCE_PREFIXES
from xpuruntime.runtime.cpu_and_memory import cpu_cores, cpu_quota
from xpuruntime.runtime.libraries.loading import (
    find_file,
    library_identity,
    mapped_libraries,
    operator_library,
    path_in_packages,
)
from xpuruntime.runtime.packages import distributions

if TYPE_CHECKING:
    from xpuruntime.runtime.machine import Machine

_POLICY_THREADS = "execution.threads"


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What validators are compared with, or collected from."""

    engine: str
    device: str
    machine: Machine
    model: LockedModel | None = None
    policy: Mapping[str, str] | None = None
    calibration: Mapping[str, Any] | None = None
    artifact: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    #: Kind and key to facts that are known once a model has run.
    facts: Mapping[tuple[ValidatorKind, str], Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    mapped: Mapping[str, str] = field(default_factory=mapped_libraries)

    def engine_facts(self) -> dict[str, Any]:
        """Return the version of the engine and the distribution that it is from."""
        facts = self.machine.engines.get(self.engine)
        results: dict[str, Any] = {"version": None if facts is None else facts.version}
        if (package := _package(self.engine)) is not None:
            results["package"] = package
        return results

    def variables(self, kernels: Iterable[str], *, compiled: bool) -> dict[str, str]:
        """Return the variables that the engine and kernels read, and what this process has set of the engine."""
        kernels = tuple(kernels)
        settings = settings_of(self.engine, self.device, self.policy or {}, compiled=compiled)
        settings |= preloaded_libraries(self.engine, self.device, self.environment, self.mapped, kernels)
        return variables_of(self.engine, self.device, {**self.environment, **settings}, kernels, compiled=compiled)

    def device_facts(self) -> dict[str, Any] | None:
        """Return what of the device decides which kernels run and how work is divided."""
        if self.device.startswith("cuda"):
            index = int(self.device.partition(":")[2] or 0)
            gpu = next((cuda for cuda in self.machine.cuda if cuda.index == index), None)
            if gpu is None:
                return None
            major, minor = gpu.compute_capability
            return {"name": gpu.name, "compute_capability": f"{major}.{minor}", "sm_count": gpu.sm_count}
        cpu = self.machine.cpu
        facts = {"name": cpu.name, "cores": cpu.cores, "architecture": self.machine.architecture}
        return {**facts, "usable": cpu_cores().logical, "quota": cpu_quota()}

    def driver_facts(self) -> dict[str, Any] | None:
        """Return the versions of NVIDIA's driver, as CUDA and as the kernel module state them."""
        if not self.machine.cuda:
            return None
        major, minor = self.machine.cuda[0].driver_version
        facts = {"cuda": f"{major}.{minor}"}
        from xpuruntime.runtime.doctor.facts import kernel_module_version

        version = kernel_module_version()
        return {**facts, "module": version} if version else facts


def collect_validators(here: Surroundings, *, kernels: Iterable[str] = ()) -> tuple[Validator, ...]:
    """Return the validators of what runs now, sorted by kind and key."""
    kernels, compilers = tuple(kernels), compilers_of(here.settings, here.device)
    expected: dict[tuple[ValidatorKind, str], Any] = {
        (ValidatorKind.ENGINE, here.engine): here.engine_facts(),
        (ValidatorKind.DEVICE, here.device): here.device_facts(),
        (ValidatorKind.ENVIRONMENT, here.engine): here.variables(kernels, compiled=bool(compilers)),
        (ValidatorKind.PACKAGE, "xpuruntime"): _version_of("xpuruntime"),
        **here.facts,
    }
    if here.model is not None:
        expected[ValidatorKind.MODEL, here.model.name] = model_facts(here.model)
        expected.update({(ValidatorKind.EXTERNAL_DATA, name): sha for name, sha in here.model.external.items()})
    if here.policy is not None:
        expected[ValidatorKind.POLICY, "policy"] = dict(here.policy)
    if not here.device.startswith("cuda"):
        expected[ValidatorKind.CPU_ISA, here.machine.architecture] = sorted(here.machine.cpu.features)
    if here.device.startswith("cuda"):
        expected[ValidatorKind.DRIVER, "nvidia"] = here.driver_facts()
    if here.calibration is not None:
        expected[ValidatorKind.CALIBRATION, "calibration"] = dict(here.calibration)
    if here.artifact is not None:
        expected[ValidatorKind.ARTIFACT, "artifact"] = here.artifact
    packages = compiler_packages(here.settings, here.device)
    if any(kind == ValidatorKind.GENERATION for kind, _ in here.facts):
        packages += ("transformers",)
    packages += quantizer_packages(here.settings) if here.calibration is not None else ()
    if here.model is None and "opt_einsum" in sys.modules:  # which orders the products in `torch.einsum`
        packages += ("opt_einsum", "opt-einsum")
    for name in packages:
        if name not in packages_of(here.engine) and (version := _version_of(name)) is not None:
            expected[ValidatorKind.PACKAGE, name] = version
    for variable in compilers:
        expected[ValidatorKind.COMPILER, variable] = _compiler(variable, here.environment)
    for name, path in libraries_of(here.engine, here.device, here.mapped, kernels).items():
        expected[ValidatorKind.LIBRARY, name] = {**library_identity(path), "place": path_in_packages(path)}
    for stated in here.settings.get("operator_libraries", ()):
        if (library := operator_library(stated)) is not None:
            facts = {**library_identity(library), "place": path_in_packages(library)}
            expected[ValidatorKind.LIBRARY, Path(library).name] = facts
    if any(kernel.startswith(OWN_KERNELS) for kernel in kernels) and (core := _core_identity()) is not None:
        expected[ValidatorKind.KERNEL_SOURCE, CORE] = core
    for kernel in filter(is_plugin, kernels):
        for package in packages_of_kernel(kernel):
            expected[ValidatorKind.PACKAGE, package] = distribution_facts(package)
        key = kernel if kernel.startswith(SOURCE_PREFIXES) else kernel.partition(".")[0]
        if not packages_of_kernel(kernel) or _plugin(key) is not None:
            expected[ValidatorKind.KERNEL_SOURCE, key] = _plugin(key)
        if (adapter := adapter_facts(kernel)) is not None:
            expected[ValidatorKind.ADAPTER, kernel] = adapter
            expected[ValidatorKind.CANARY, kernel] = canary_facts(here.environment)
    return tuple(
        Validator(id=stable_id(kind, key), kind=kind, key=key, expect=value)
        for (kind, key), value in sorted(expected.items())
    )


def compare_validators(identity: Identity, here: Surroundings) -> tuple[Difference, ...]:
    """Return a drift for each validator of a lock that differs from what is here.

    Nothing is loaded and no device is touched: of libraries the headers of their files are read.
    """
    drifts = []
    for validator in identity.validators:
        observed, expected = _found(validator, here, identity), _expected(validator)
        if validator.kind == ValidatorKind.ENVIRONMENT:  # of an earlier release, which kept more of them
            expected = variables_of(validator.key, here.device, expected, identity.kernels, compiled=identity.compiled)
            expected, observed = with_thread_counts(expected, observed or {})
        if validator.kind == ValidatorKind.DEVICE and observed is not None and expected is not None:  # which kept fewer
            observed = within_threads({name: value for name, value in observed.items() if name in expected}, identity)
            expected = within_threads(expected, identity)
        if validator.kind == ValidatorKind.MODEL and here.model is not None and identity.model is not None:
            observed = {**(observed or {}), "format": here.model.format}
            expected = {**(expected or {}), "format": identity.model.format}
        if observed != expected:
            drifts.append((validator, expected, observed))
    found_beside = {} if here.model is None or identity.model is None else here.model.external
    for name, digest in found_beside.items():
        if identity.model is not None and name not in identity.model.external:  # an engine reads whatever lies there
            kind = ValidatorKind.EXTERNAL_DATA
            drifts.append((Validator(id=stable_id(kind, name), kind=kind, key=name, expect=None), None, digest))
    return _drifts(drifts, identity)


def compare_libraries(identity: Identity) -> tuple[Difference, ...]:
    """Return a drift for each library of a lock that this process has mapped, and that is another build."""
    mapped = mapped_libraries()
    drifts = []
    for validator in identity.validators:
        path = mapped.get(validator.key) if validator.kind == ValidatorKind.LIBRARY else None
        if path is None:
            continue
        observed, expected = library_identity(path), _expected(validator)
        if observed != expected:
            drifts.append((validator, expected, observed))
    return _drifts(drifts, identity)


def _expected(validator: Validator) -> Any:
    if validator.kind == ValidatorKind.LIBRARY and isinstance(validator.expect, dict):
        return {name: value for name, value in validator.expect.items() if name != "place"}
    return validator.expect


def _drifts(differing: Sequence[tuple[Validator, Any, Any]], identity: Identity) -> tuple[Difference, ...]:
    dependents = identity.dependents() if differing else {}
    return tuple(
        validator_drift(validator, expected, now, dependents.get(validator.id, ()), identity)
        for validator, expected, now in differing
    )


def within_threads(device: dict[str, Any], identity: Identity) -> dict[str, Any]:
    """Return facts of a device without the processors that the threads which the policy of a lock states do not need.

    Kernels of xpuruntime for the CPU have threads of their own: where they ran, all processors count.
    """
    stated = (
        next((validator.expect for validator in identity.validators if validator.kind == ValidatorKind.POLICY), None)
        or {}
    )
    threads = stated.get(_POLICY_THREADS, "")
    if not threads.isdecimal() or any(kernel.startswith("cpu.") for kernel in identity.kernels):
        return device
    results = dict(device)
    if isinstance(results.get("usable"), int):
        results["usable"] = min(results["usable"], int(threads))
    if isinstance(results.get("quota"), (int, float)) and results["quota"] >= int(threads):
        results["quota"] = None
    return results


def _found(validator: Validator, here: Surroundings, identity: Identity) -> Any:
    """Return what stands here where the lock has a validator; ``None`` where there is no such thing."""
    kind, key = validator.kind, validator.key
    if kind == ValidatorKind.LIBRARY:
        folder = validator.expect.get("place", "") if isinstance(validator.expect, dict) else ""
        path = find_file(key, str(folder), here.mapped)
        try:
            return None if path is None else library_identity(path)
        except InputError as error:
            return str(error)
    if kind == ValidatorKind.MODEL:
        return None if here.model is None else model_facts(here.model)
    if kind == ValidatorKind.EXTERNAL_DATA:
        return None if here.model is None else here.model.external.get(key)
    if kind == ValidatorKind.POLICY:
        return validator.expect if here.policy is None else dict(here.policy)
    if kind == ValidatorKind.ENGINE:
        return here.engine_facts() if key == here.engine else None
    if kind == ValidatorKind.DEVICE:
        return here.device_facts() if key == here.device else None
    if kind == ValidatorKind.DRIVER:
        return here.driver_facts()
    if kind == ValidatorKind.CPU_ISA:
        return sorted(here.machine.cpu.features) if key == here.machine.architecture else None
    if kind == ValidatorKind.ENVIRONMENT:
        return here.variables(identity.kernels, compiled=identity.compiled)
    if kind == ValidatorKind.PACKAGE:
        return distribution_facts(key) if isinstance(validator.expect, dict) else _version_of(key)
    if kind == ValidatorKind.COMPILER:
        return _compiler(key, here.environment)
    if kind == ValidatorKind.KERNEL_SOURCE:
        return _core_identity() if key == CORE else _plugin(key)
    if kind == ValidatorKind.ADAPTER:
        return adapter_facts(key)
    if kind == ValidatorKind.CANARY:
        return canary_facts(here.environment)
    if kind == ValidatorKind.CALIBRATION:
        return None if here.calibration is None else dict(here.calibration)
    if kind in (ValidatorKind.GENERATION, ValidatorKind.TOKENIZER):
        return here.facts.get((kind, key), validator.expect)  # compared when it runs
    return here.artifact


def _core_identity() -> dict[str, Any] | None:
    from xpuruntime import _core

    path = getattr(_core, "__file__", None)
    return None if path is None else library_identity(path)


def _plugin(backend: str) -> dict[str, str] | None:
    from xpuruntime.ops.call_context import prepare
    from xpuruntime.ops.plugins import plugin_facts

    prepare()
    return source_of(backend) or plugin_facts(backend)


def _compiler(variable: str, environment: Mapping[str, str]) -> str | None:
    default = "g++" if variable == "CXX" else "gcc" if shutil.which("gcc") else "clang"
    command = shlex.split(environment.get(variable) or default)
    try:
        shown = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return next(iter(shown.splitlines()), None)


def validator_drift(
    validator: Validator, expected: Any, observed: Any, entries: tuple[str, ...], identity: Identity
) -> Difference:
    """Return the drift of a validator: of a mapping the keys that differ, and the command that restores it."""
    before, now = shown(expected), shown(observed)
    if isinstance(expected, dict) and isinstance(observed, dict):
        differ = [name for name in sorted({*expected, *observed}) if expected.get(name) != observed.get(name)]
        before = ", ".join(f"{name} {shown(expected.get(name))}" for name in differ)
        now = ", ".join(f"{name} {shown(observed.get(name))}" for name in differ)
    if validator.kind == ValidatorKind.CPU_ISA and isinstance(expected, list) and isinstance(observed, list):
        before = f"{len(expected)} features" + _with_features(set(expected) - set(observed))
        now = f"{len(observed)} features" + _with_features(set(observed) - set(expected))
    reason = ""
    if validator.kind == ValidatorKind.MODEL and isinstance(expected, dict) and isinstance(observed, dict):
        reason = _model_reason(expected, observed)
    return Difference(
        code=DriftCode(validator.kind),
        subject=validator.key,
        reason=reason,
        validator=validator.id,
        before=before,
        after=now,
        entries=entries,
        restore=_restore_command(validator, expected, observed, identity),
    )


def _model_reason(expected: dict[str, str], observed: dict[str, str]) -> str:
    if expected.get("sha256") == observed.get("sha256"):
        return ""
    if "graph" not in expected or "graph" not in observed:
        return "the file differs"
    graph, weights = (expected[part] == observed[part] for part in ("graph", "initializers"))
    if graph and weights:
        return "the file differs, its graph and its weights are the same"
    if not graph and not weights:
        return "the graph and the weights differ"
    return "the weights differ, the graph is the same" if graph else "the graph differs, the weights are the same"


def _with_features(names: set[str]) -> str:
    return f" with {' '.join(sorted(names))}" if names else ""


def _restore_command(validator: Validator, expected: Any, observed: Any, identity: Identity) -> str:
    """Return the pin or the command that restores what a validator of a lock expects."""
    kind = validator.kind
    if expected is None and kind == ValidatorKind.EXTERNAL_DATA:
        return f"remove {validator.key}, which is new, or make the lock again"
    if expected is None:
        return "make the lock again: where it was made there was no such thing"
    if kind in (ValidatorKind.ENGINE, ValidatorKind.LIBRARY):
        pin = next((_pin(other) for other in identity.validators if other.kind == ValidatorKind.ENGINE), None)
        own = str(expected.get("place", "")) if isinstance(expected, dict) else ""
        return pin or f"install the build of {own or validator.key} that the lock was made with"
    if kind == ValidatorKind.ENVIRONMENT and isinstance(expected, dict) and isinstance(observed, dict):
        differ = [name for name in sorted({*expected, *observed}) if expected.get(name) != observed.get(name)]
        return "; ".join(
            setting_text(name, expected.get(name))
            if "." in name
            else f"preload {expected[name]} with LD_PRELOAD"
            if name == PRELOAD and name in expected
            else f"export {shlex.quote(f'{name}={expected[name]}')}"
            if name in expected
            else f"unset {shlex.quote(name)}"
            for name in differ
        )
    if kind == ValidatorKind.PACKAGE:
        version = expected["version"] if isinstance(expected, dict) else expected
        return f"pip install {shlex.quote(f'{validator.key}=={version}')}"
    if kind == ValidatorKind.KERNEL_SOURCE and validator.key != CORE:
        pin = expected.get("package")
        brought = f"the kernels {validator.key} {expected.get('version', '')}".rstrip()
        return f"pip install {shlex.quote(pin)}" if pin else f"register {brought} that the lock was made with"
    if kind == ValidatorKind.CANARY and isinstance(observed, dict) and expected["result"] != observed["result"]:
        off = expected["result"] != "passed"
        return f"export {CANARY_VARIABLE}=off" if off else f"unset {CANARY_VARIABLE}"
    if kind == ValidatorKind.ADAPTER and not expected["class"].startswith("xpuruntime."):
        return f"install the package of {expected['class']} that the lock was made with"
    if kind in (ValidatorKind.KERNEL_SOURCE, ValidatorKind.ADAPTER, ValidatorKind.CANARY):
        version = next(
            (v.expect for v in identity.validators if v.kind == ValidatorKind.PACKAGE and v.key == "xpuruntime"), None
        )
        return f"install the build of xpuruntime {version or ''}".rstrip() + " that the lock was made with"
    if kind == ValidatorKind.CALIBRATION and isinstance(expected, dict) and isinstance(observed, dict):
        if expected.get("content") == observed.get("content"):
            return "restore the order of the samples: they are the same, in another order"
        return "restore the samples that were locked; `xrt policy calibration MODEL PATH` prints the digest of others"
    return {
        ValidatorKind.MODEL: "restore the file that was locked",
        ValidatorKind.EXTERNAL_DATA: f"restore {validator.key} beside the model",
        ValidatorKind.POLICY: "state the policy that was locked, or none: the lock has it",
        ValidatorKind.DEVICE: f"run on {shown(expected)}",
        ValidatorKind.DRIVER: f"install the driver {shown(expected)}",
        ValidatorKind.CPU_ISA: "run on a processor with the same instruction sets",
        ValidatorKind.COMPILER: f"export {shlex.quote(validator.key)}=PATH of {shown(expected)}",
        ValidatorKind.CALIBRATION: "name the inputs that were locked with calibration= (--calibration PATH)",
        ValidatorKind.ARTIFACT: "restore the artifact that was locked, or compile it again",
        ValidatorKind.GENERATION: "generate as the lock has it",
        ValidatorKind.TOKENIZER: "give lock() the tokenizer that was locked",
    }.get(kind, "")


def _pin(engine: Validator) -> str | None:
    expect = engine.expect
    if not isinstance(expect, dict) or not expect.get("package"):
        return None
    return f"pip install {expect['package']}"


@functools.lru_cache(maxsize=1)
def _installed(search_path: tuple[str, ...]) -> dict[str, str]:
    results: dict[str, str] = {}
    for distribution in distributions(search_path):
        results.setdefault(distribution.name, distribution.version)
    return results


def _package(engine: str) -> str | None:
    installed = _installed(tuple(sys.path))
    return next((f"{name}=={installed[name]}" for name in packages_of(engine) if name in installed), None)


def _version_of(package: str) -> str | None:
    if package == "xpuruntime":
        from xpuruntime import __version__

        return __version__
    return _installed(tuple(sys.path)).get(package)
