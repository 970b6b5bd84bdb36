# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Tunable`: a setting that an engine lets a tuner search, with the values to try and what it depends on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.runtime.cpu_and_memory import cpu_cores

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xpuruntime.engines.options import Option

__all__ = ["Tunable", "of_options", "of_policy"]

_PRECISIONS = ("model", "fp32", "tf32", "fp16", "bf16", "int8")


class Tunable(msgspec.Struct, frozen=True, kw_only=True):
    """A setting that can be searched."""

    key: str
    values: tuple[Any, ...]
    needs: dict[str, tuple[Any, ...]] = {}
    first: bool = False


def of_policy(device: str) -> tuple[Tunable, ...]:
    """Return the keys of a policy that may be searched on a device, whatever the engine. A plan says what it takes."""
    kind = device.partition(":")[0]
    found = [Tunable(key="execution.precision", values=_PRECISIONS)]
    if kind == "cpu":
        cores = cpu_cores()
        found.append(Tunable(key="execution.threads", values=(None, 1, cores.physical, cores.logical)))
    if kind == "cuda":
        found.append(Tunable(key="execution.cuda_graph", values=("off", "require")))
        found.append(Tunable(key="execution.layout", values=("auto", "nhwc")))
    return tuple(found)


def of_options(engine: str, table: Mapping[str, Option]) -> tuple[Tunable, ...]:
    """Return the options of a table that state values to search."""
    prefix = f"execution.provider_options.{engine}."
    return tuple(
        Tunable(
            key=prefix + name,
            values=(None, *option.search),
            needs={prefix + other: values for other, values in option.needs.items()},
            first=option.search_first,
        )
        for name, option in table.items()
        if option.search and option.owned_by is None
    )
