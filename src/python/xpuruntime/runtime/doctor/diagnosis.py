# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`diagnose`: what is wrong with this machine's set-up, and the exact command that fixes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.files.paths import json_text
from xpuruntime.policies.advisories import Advisory, Platform, holding
from xpuruntime.printable import printable
from xpuruntime.runtime.doctor import checks
from xpuruntime.runtime.doctor.facts import BuildFacts, Facts, Finding, FindingCode, TorchFacts, gather
from xpuruntime.runtime.snapshot import Probed, core_problem, machine_snapshot
from xpuruntime.shown import Shown

if TYPE_CHECKING:
    from rich.console import RenderableType

    from xpuruntime.runtime.machine import EngineFacts

_ORDER = {"error": 0, "warning": 1, "info": 2}
_COLOUR = {"error": "bold red", "warning": "yellow", "info": "dim"}
#: Variables that are no problem by themselves: where libraries are looked for.
_QUIET = frozenset({"LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES"})


class Diagnosis(Shown, msgspec.Struct, frozen=True, kw_only=True):
    """The findings, worst first, with the facts they were made from."""

    facts: Facts
    findings: tuple[Finding, ...]
    schema: str = "xpuruntime.doctor/1"

    @property
    def healthy(self) -> bool:
        """Whether there is no error."""
        return all(finding.severity != "error" for finding in self.findings)

    def of_kernels(self) -> Diagnosis:
        """Return the advisories alone: kernels, PyTorch's own included, that give wrong numbers on this machine."""
        advisories = tuple(finding for finding in self.findings if finding.code == FindingCode.KERNEL_ADVISORY)
        return msgspec.structs.replace(self, findings=advisories)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return {
            "schema": plain["schema"],
            "healthy": self.healthy,
            "findings": plain["findings"],
            "loaded_libraries": plain["facts"].pop("loaded"),
            **plain["facts"],
        }

    def to_json(self, *, indent: int = 2) -> str:
        """Return JSON text."""
        return json_text(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        """Return plain text."""
        lines = [self.headline]
        for finding in self.findings:
            lines.append(f"{finding.severity}: {finding.code}: {finding.what}")
            lines.append(f"  why: {finding.why}")
            if finding.fix:
                lines.append(f"  fix: {finding.fix}")
        if self.facts.build is not None:
            lines.append(f"core: {_build_line(self.facts.build)}")
        if self.facts.torch is not None:
            lines.append(_torch_line(self.facts.torch))
        lines.append(f"libraries loaded in this process: {len(self.facts.loaded) or 'none'}")
        lines.extend(f"  {lib.name} {lib.version or '-'} {lib.path}" for lib in self.facts.loaded)
        return printable("\n".join(lines))

    def __rich__(self) -> RenderableType:
        return self.rendered()

    def rendered(self, *, libraries: bool = True) -> RenderableType:
        """Return the verdict, what is wrong, the engines, what else was found, and the libraries that are loaded."""
        from rich.console import Group
        from rich.text import Text

        from xpuruntime.tables import rows_table

        parts: list[RenderableType] = [Text(self.headline, style="green" if self.healthy else "bold red")]
        engines = _engine_table(self.facts.machine.engines)
        for finding in sorted(self.findings, key=lambda finding: finding.severity == "info"):
            if finding.severity == "info" and engines not in parts:
                parts.append(engines)
            text = Text.assemble((f"{finding.severity} {finding.code}", _COLOUR[finding.severity]), f"  {finding.what}")
            text.append(f"\n  why: {finding.why}", style="dim")
            if finding.fix:
                text.append(f"\n  fix: {finding.fix}", style="bold")
            parts.append(text)
        if engines not in parts:
            parts.append(engines)
        if self.facts.build is not None:
            parts.append(Text(f"core: {_build_line(self.facts.build)}"))
        if self.facts.torch is not None:
            parts.append(Text(_torch_line(self.facts.torch)))
        if not libraries:
            hint = f"For the {len(self.facts.loaded)} libraries that are loaded, pipe it into less, or add --json."
            return Group(*parts, Text(hint, style="dim"))
        loaded = rows_table(
            "libraries loaded in this process",
            ("library", "version", "path"),
            [(lib.name, lib.version or "-", lib.path) for lib in self.facts.loaded],
            most=None,
        )
        parts += loaded or [Text("libraries loaded in this process: none")]
        return Group(*parts)

    @property
    def headline(self) -> str:
        """The verdict in a few words."""
        count = {kind: sum(finding.severity == kind for finding in self.findings) for kind in _ORDER}
        if not count["error"] and not count["warning"]:
            return "no problem found"
        return ", ".join(f"{n} {kind}" if n == 1 else f"{n} {kind}s" for kind, n in count.items() if kind != "info")


def diagnose(engines: Iterable[Probed] | Mapping[str, Probed] = (), *, torch: TorchFacts | None = None) -> Diagnosis:
    """Probe this machine and check it."""
    problem = core_problem()
    machine = machine_snapshot(engines)
    return examine(gather(machine, core_error=problem, torch=torch))


def examine(facts: Facts) -> Diagnosis:
    """Run every check on stated facts. Pure."""
    findings = [finding for check in CHECKS for finding in check(facts)]
    return Diagnosis(facts=facts, findings=tuple(sorted(findings, key=lambda finding: _ORDER[finding.severity])))


def check_engines(facts: Facts) -> Iterator[Finding]:
    """Check that engines that are installed can be loaded, with all their providers."""
    gpu = checks.has_nvidia(facts)
    for name, engine in facts.machine.engines.items():
        if engine.version is not None and not engine.loadable:
            yield Finding(
                code=FindingCode.ENGINE_BROKEN,
                severity="error",
                what=f"{name} {engine.version} is installed but cannot be loaded",
                why=engine.reason or "its package does not import",
                fix=engine.fix,
            )
        for provider, reason in engine.broken.items():
            nvidia = gpu and provider == "CUDAExecutionProvider"
            wanted = nvidia or provider == "CPU"  # which every machine has
            what = "is present but cannot be loaded here" if wanted else "has no device that it can use here"
            yield Finding(
                code=FindingCode.PROVIDER_BROKEN if wanted else FindingCode.NO_DEVICE,
                severity="error" if wanted else "info",
                what=f"{name}: {provider} {what}",
                why=reason,
                fix=(engine.fix if wanted else None) or (checks.cuda_extra() if nvidia else None),
            )


def check_plugins(facts: Facts) -> Iterator[Finding]:
    """Name the plugins that failed to load: without them everything else goes on."""
    for sentence in facts.plugins:
        yield Finding(
            code=FindingCode.PLUGIN_FAILED,
            severity="error",
            what=sentence,
            why="an installed package names it, and loading it raised an error",
            fix="upgrade or uninstall that package",
        )


def check_torch(facts: Facts) -> Iterator[Finding]:
    """Name what gives PyTorch a faster way to the policy that holds."""
    torch = facts.torch
    if torch is not None and torch.reason:
        yield Finding(
            code=FindingCode.TORCH_FAST_PATH,
            severity="info" if torch.route else "error",
            what=_torch_line(torch),
            why=torch.reason,
            fix=torch.fix or None,
        )


def check_advisories(facts: Facts) -> Iterator[Finding]:
    """Name the kernels that are known to give wrong numbers here."""
    if facts.torch is None:
        return
    version, cudnn = tuple(int(part) for part in facts.torch.version.split(".")[:2]), facts.torch.cudnn or ()
    places = [("cpu", facts.machine.cpu.name)]
    places += [("sm{}{}".format(*device.compute_capability), device.name) for device in facts.machine.cuda]
    rows: dict[Advisory, list[str]] = {}
    for arch, name in places:
        for row in holding(Platform(version, cudnn, arch)):
            rows.setdefault(row, []).append(name)
    for row, devices in rows.items():
        yield Finding(
            code=FindingCode.KERNEL_ADVISORY,
            severity="warning",
            what=f"{' and '.join(row.kernels)}: {row.wrong}",
            why=f"known of these versions on {', '.join(dict.fromkeys(devices))}: {row.reference}",
            fix=row.fix
            or f"state `kernels: {{{row.op}: auto}}` in the policy, which takes another kernel for such calls",
        )


def check_environment(facts: Facts) -> Iterator[Finding]:
    """Name the variables that change what engines do without being in a policy."""
    for name, value in facts.environment.items():
        if name not in _QUIET:
            yield Finding(
                code=FindingCode.ENVIRONMENT_OVERRIDE,
                severity="warning",
                what=f"{name}={value} is set",
                why="engines read it, and no policy or plan can see what it changes",
                fix=f"unset {name}",
            )


def _build_line(build: BuildFacts) -> str:
    if not build.cuda:
        return "built without CUDA"
    kernels = [name for name, built in (("cuBLAS", build.cublas), ("cuDNN", build.cudnn)) if built]
    return f"built with CUDA for {build.architectures}, with kernels of {' and '.join(kernels) or 'no vendor library'}"


def _torch_line(torch: TorchFacts) -> str:
    return f"PyTorch {torch.version}, policy route: {torch.route or 'none'}"


def _engine_table(engines: Mapping[str, EngineFacts]) -> RenderableType:
    from rich.text import Text

    from xpuruntime.tables import table

    shown = table("engines", ("engine", "version", "loadable", "providers"))
    for name, engine in engines.items():
        state = Text("yes", style="green") if engine.loadable else Text("no", style="red")
        shown.add_row(name, engine.version or "not installed", state, ", ".join(engine.providers))
    return shown


#: Every check, in the order they run.
CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    checks.check_onnxruntime,
    checks.check_qnn,
    checks.check_copies,
    checks.check_versions,
    checks.check_core_build,
    checks.check_backends,
    checks.check_driver,
    checks.check_libraries,
    checks.check_loaded,
    check_engines,
    check_plugins,
    check_torch,
    check_advisories,
    check_environment,
)
