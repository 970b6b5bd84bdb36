# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""``xrt kernels``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from xpuruntime.cli.completion import operations
from xpuruntime.cli.options import JsonOption

if TYPE_CHECKING:
    from rich.console import RenderableType

    from xpuruntime.ops.listing import KernelInfo

__all__ = ["kernels"]


def kernels(
    op: Annotated[
        str | None,
        typer.Argument(
            help="Only kernels of this operation, such as matmul or attention_backward.", autocompletion=operations
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """List the kernels that a policy can ask for, in the order in which they are tried.

    Kernels of installed plugins are included. One that cannot be used here is listed with the reason.
    """
    from xpuruntime.cli.output import console, print_json, working
    from xpuruntime.ops.listing import kernels as all_kernels

    with working("looking at kernels and their libraries", as_json=json):
        found = all_kernels(op)
    if json:
        print_json({"schema": "xpuruntime.kernels/1", "kernels": [kernel.to_dict() for kernel in found]})
    else:
        console().print(_listing(found))


def _listing(found: tuple[KernelInfo, ...]) -> RenderableType:
    """Return a row for each kernel, and below, once for each reason, those that cannot be used here."""
    from rich.console import Group
    from rich.text import Text

    from xpuruntime.evidence.render_text.tables import table

    made = table("kernels", ("operation", "kernel", "usable here", "also named", "serves"))
    made.columns[0].no_wrap = made.columns[1].no_wrap = True
    missing: dict[str, list[str]] = {}
    for kernel in found:
        usable = "yes" if kernel.available else "no"
        if not kernel.available:
            missing.setdefault(str(kernel.reason), []).append(f"{kernel.op} {kernel.id}")
        elif not kernel.automatic:
            usable = "only where it is asked for"
        serves = f"{kernel.description} ({kernel.device_type}: {kernel.limits})"
        made.add_row(kernel.op, kernel.id, usable, Text(", ".join(kernel.families)), Text(serves))
    return Group(made, *(Text(f"not usable here: {', '.join(names)}: {reason}") for reason, names in missing.items()))
