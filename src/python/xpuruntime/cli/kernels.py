# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""``xrt kernels``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from xpuruntime.cli.options import JsonOption

if TYPE_CHECKING:
    from rich.table import Table

    from xpuruntime.ops.listing import KernelInfo

__all__ = ["kernels"]


def kernels(
    op: Annotated[
        str | None, typer.Argument(help="Only kernels of this operation, such as matmul or attention_backward.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """List the kernels that a policy can ask for, in the order in which they are tried.

    Those of installed plugins are among them. A kernel that cannot be used here says why.
    """
    from xpuruntime.cli.output import console, print_json, working
    from xpuruntime.ops.listing import kernels as all_kernels

    with working("looking at kernels and their libraries", as_json=json):
        found = all_kernels(op)
    if json:
        print_json([kernel.to_dict() for kernel in found])
    else:
        console().print(_table(found))


def _table(found: tuple[KernelInfo, ...]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title="kernels", title_justify="left")
    for column in ("operation", "kernel", "also", "device", "serves", "here"):
        table.add_column(column, overflow="fold")
    last = None
    for kernel in found:
        here = kernel.version if kernel.available else f"no: {kernel.reason}"
        if not kernel.automatic:
            here += "; only where it is asked for"
        table.add_row(
            kernel.op if kernel.op != last else "",
            kernel.id,
            ", ".join(kernel.families),
            kernel.device_type,
            Text(f"{kernel.description}. {kernel.limits}"),
            Text(here),
            end_section=False,
        )
        last = kernel.op
    return table
