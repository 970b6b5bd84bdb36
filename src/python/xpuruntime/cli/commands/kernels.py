# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""``xrt kernels``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from xpuruntime.cli.completion import operations
from xpuruntime.cli.options import JsonOption

if TYPE_CHECKING:
    from rich.table import Table

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
        console().print(_table(found))


def _table(found: tuple[KernelInfo, ...]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title="kernels", title_justify="left", show_lines=True)
    table.add_column("operation", no_wrap=True)
    table.add_column("kernel", no_wrap=True)
    table.add_column("what it serves, and whether it can be used here", overflow="fold")
    last = None
    for kernel in found:
        here = f"here: {kernel.version}" if kernel.available else f"not here: {kernel.reason}"
        lines = [kernel.description, f"{kernel.device_type}: {kernel.limits}", here]
        if kernel.families:
            lines.append(f"also named {', '.join(kernel.families)}")
        if not kernel.automatic:
            lines.append("only where it is asked for")
        table.add_row("" if kernel.op == last else kernel.op, kernel.id, Text("\n".join(lines)))
        last = kernel.op
    return table
