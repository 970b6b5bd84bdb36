# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Parts of the sections of ``docs/benchmarks.md``."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Check(NamedTuple):
    """A figure beside its target: at most `target` is met."""

    what: str
    figure: float
    target: float
    unit: str

    @property
    def verdict(self) -> str:
        """Return ``met`` or ``missed``, and by how much."""
        distance = number(abs(self.target - self.figure))
        word = "met" if self.figure <= self.target else "**missed**"
        return f"{word} by {distance} {self.unit}"


class Section(NamedTuple):
    """One part of the page."""

    title: str
    text: str
    checks: tuple[Check, ...] = ()


def number(value: float) -> str:
    """Return `value` with three or four digits that matter, never in powers of ten."""
    size = abs(value)
    return (
        f"{value:.3f}"
        if size < 1
        else f"{value:.2f}"
        if size < 10
        else f"{value:.1f}"
        if size < 100
        else f"{value:,.0f}"
    )


def spread(samples: Sequence[float]) -> tuple[float, float, float]:
    """Return median, 10th and 90th percentile."""
    if len(samples) < 2:
        return samples[0], samples[0], samples[0]
    tenths = statistics.quantiles(samples, n=10, method="inclusive")
    return statistics.median(samples), tenths[0], tenths[-1]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; columns but the first are figures or short words."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def machine(record: dict[str, Any]) -> str:
    """Return hardware and versions as two lines."""
    env = record["environment"]
    devices = [
        f"{d['device']}: {d['name']}, {d['memory'] / (1 << 30):.0f} GiB, compute capability {d['compute_capability']}, "
        f"driver for CUDA {d['driver']}"
        for d in env.get("cuda", ())
    ]
    processor = env.get("processor") or "processor not recorded"
    hardware = "; ".join([f"{processor}, {env['cores']} logical cores, {env['architecture']}", *devices])
    packages = ", ".join(f"{name} {version}" for name, version in env["packages"].items())
    return f"Hardware: {hardware}.\n\nVersions: {env['system']}, Python {env['python']}, {packages}.\n"


def target_table(checks: Sequence[Check]) -> str:
    """Return the table of figures beside their targets."""
    return table(
        ("", "figure", "target", ""),
        [(c.what, f"{number(c.figure)} {c.unit}", f"≤ {number(c.target)} {c.unit}", c.verdict) for c in checks],
    )
