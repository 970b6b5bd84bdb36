# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""``xrt devices``, ``doctor`` and ``kernels``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from xpuruntime.cli.options import HtmlOption, JsonOption, flag_option, operations
from xpuruntime.printable import bytes_text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from xpuruntime.ops.decision_log import KernelInfo
    from xpuruntime.runtime.machine import Machine


def devices(json: JsonOption = False) -> None:
    """List the devices and engines of this machine.

    With the JSON, `xrt plan --machine FILE` plans for this machine on another one.
    """
    from xpuruntime.cli.output import console, print_json, working
    from xpuruntime.engines.registry import default_registry
    from xpuruntime.runtime.snapshot import machine_snapshot, machine_to_json

    with working("probing engines", as_json=json):
        machine = machine_snapshot(default_registry().engines())
    if json:
        print_json(machine_to_json(machine))
    else:
        console().print(_machine_tables(machine))


def doctor(
    json: JsonOption = False,
    of_kernels: Annotated[
        bool, flag_option("--kernels", "Only name kernels, PyTorch's own too, that are known to be wrong here.")
    ] = False,
    html: HtmlOption = None,
) -> int:
    """Check the set-up: packages, driver, libraries, engines. Print the exact command that fixes each problem.

    Exits with 3 when a problem keeps this machine from running what it could.
    """
    from xpuruntime.cli import diagnosing
    from xpuruntime.cli.exit_codes import ExitCode
    from xpuruntime.cli.output import on_screen, print_and_save, working

    with working("looking at packages, libraries and engines", as_json=json):
        diagnosis = diagnosing.diagnosis_apart()
    if of_kernels:
        diagnosis = diagnosis.of_kernels()
    shown = diagnosis.rendered(libraries=not on_screen())  # a screen is for what was found
    print_and_save(diagnosis, html=html, shown=shown, as_json=json)
    return ExitCode.OK if diagnosis.healthy else ExitCode.ENVIRONMENT


def _machine_tables(machine: Machine) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from xpuruntime.tables import table

    devices = table("devices", ("device", "name", ">memory", "facts", "features, or types it computes in"))
    cpu = machine.cpu
    devices.add_row(
        "cpu",
        Text(cpu.name),
        bytes_text(cpu.total_memory or None),
        f"{cpu.cores} logical cores",
        ", ".join(cpu.features),
    )
    for gpu in machine.cuda:
        major, minor = gpu.compute_capability
        facts = (
            f"compute {major}.{minor}, {gpu.sm_count} SMs, driver CUDA {_dots(gpu.driver_version)}, "
            f"runtime CUDA {_dots(gpu.runtime_version)}, PCI {gpu.pci_id}"
        )
        devices.add_row(
            f"cuda:{gpu.index}", Text(gpu.name), bytes_text(gpu.total_memory or None), facts, ", ".join(gpu.dtypes)
        )
    engines = table("engines", ("engine", "version", "loadable", "providers"))
    broken = []
    for name, engine in machine.engines.items():
        loadable = Text("yes", style="green") if engine.loadable else Text("no", style="red")
        engines.add_row(name, engine.version or "not installed", loadable, ", ".join(engine.providers))
        if engine.version is not None and not engine.loadable:
            broken.append(Text(f"{name} cannot be loaded: {engine.reason or 'no reason is known'}", style="red"))
    parts: list[RenderableType] = [
        Text(f"{machine.system} {machine.architecture}, Python {machine.python}"),
        devices,
        engines,
        *broken,
    ]
    if machine.cuda_reason:
        parts.insert(2, Text(f"no CUDA device: {machine.cuda_reason}", style="yellow"))
    return Group(*parts)


def _dots(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def kernels(
    op: Annotated[
        str | None,
        typer.Argument(
            metavar="OPERATION",
            help="Only kernels of this operation, such as matmul or attention_backward.",
            autocompletion=operations,
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """List the kernels that a policy can ask for, in the order in which they are tried.

    Kernels of installed plugins are included, and those of PyTorch policies alone follow. One that cannot be used here
    is listed with the reason.
    """
    from xpuruntime.cli.output import console, on_screen, print_json, working
    from xpuruntime.ops.decision_log import kernels as all_kernels

    with working("looking at kernels and their libraries", as_json=json):
        listed = all_kernels(op)
    if json:
        every = [kernel.to_dict() for kernel in listed]
        print_json({"schema": "xpuruntime.kernels/1", "kernels": every, "pytorch": _of_pytorch(op)})
    elif op is None and on_screen():
        console().print(_by_kernel(listed))
    else:
        console().print(_listing(listed, _of_pytorch(op)))


def _of_pytorch(op: str | None) -> dict[str, str]:
    """Return the ids that policies for PyTorch take beside, and what each is; PyTorch is not imported for it."""
    from xpuruntime.ops.torch_kernels import is_torch_kernel
    from xpuruntime.policies.kernel_rules import KERNEL_IDS, OPS

    forward = next((name for name in OPS if op is not None and op.startswith(name)), op)
    return {
        kernel: description
        for kernel, (ops, description) in KERNEL_IDS.items()
        if (kernel.startswith("torch.") or is_torch_kernel(kernel)) and (forward is None or forward in ops)
    }


def _by_kernel(listed: tuple[KernelInfo, ...]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from xpuruntime.tables import table

    shown = table("kernels", ("kernel", "usable here", "operations"))
    for name in dict.fromkeys(kernel.id for kernel in sorted(listed, key=lambda kernel: not kernel.available)):
        kernels = [kernel for kernel in listed if kernel.id == name]
        usable = " or ".join(dict.fromkeys(_usable(kernel) for kernel in kernels))
        shown.add_row(name, usable, ", ".join(kernel.op for kernel in kernels))
    hint = (
        "For what each serves, why one is not usable, and those of PyTorch, name an operation, as in `xrt kernels "
        "matmul`."
    )
    return Group(shown, Text(hint, "dim"))


def _usable(kernel: KernelInfo) -> str:
    if not kernel.available:
        return "no"
    return "yes" if kernel.automatic else "on request"


def _listing(listed: tuple[KernelInfo, ...], of_pytorch: dict[str, str]) -> RenderableType:
    """Return a row for each kernel; below, once for each reason, those that cannot be used here, and PyTorch's."""
    import textwrap

    from rich.console import Group
    from rich.text import Text

    from xpuruntime.tables import rows_table, table

    ops = len({kernel.op for kernel in listed}) > 1
    listing = table("kernels", (*("operation",) * ops, "kernel", "usable here", "?also named", "serves"))
    for column in listing.columns[: 1 + ops]:
        column.no_wrap = True
    missing: dict[str, list[str]] = {}
    for kernel in listed:
        if not kernel.available:
            missing.setdefault(str(kernel.reason), []).append(f"{kernel.op} {kernel.id}" if ops else kernel.id)
        serves = f"{kernel.description} ({kernel.device_type}: {kernel.limits})"
        families = ", ".join(kernel.families)
        listing.add_row(*(kernel.op,) * ops, kernel.id, _usable(kernel), Text(families), Text(serves))
    parts: list[RenderableType] = [listing] if listed else []
    for reason, names in missing.items():
        filled = textwrap.fill(", ".join(names), 100, initial_indent="  ", subsequent_indent="  ")
        parts.append(Text(f"\nnot usable here: {reason}\n{filled}"))
    rows = list(of_pytorch.items())
    return Group(*parts, *rows_table("in policies for PyTorch also", ("kernel", "serves"), rows, most=None))
