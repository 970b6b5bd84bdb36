# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Advisories: kernels of vendors that are known to give wrong numbers, with the calls, versions and devices concerned.

The rows are data, and ``XPURUNTIME_ADVISORIES`` names a file with more of them. Where one holds, `auto` takes another
kernel, a kernel that is named is refused or passed over, and `xrt doctor` names the row.
"""

from __future__ import annotations

import functools
import os
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from xpuruntime.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["ADVISORIES", "VARIABLE", "AdvisedCall", "Advisory", "Platform", "advisories", "holding"]

#: Names a YAML file with further advisories.
VARIABLE = "XPURUNTIME_ADVISORIES"


class Platform(NamedTuple):
    """Where a kernel would run."""

    torch: tuple[int, ...]
    cudnn: tuple[int, ...]
    arch: str


class AdvisedCall(NamedTuple):
    """What rows ask for of a call of attention."""

    gradient: bool
    mask: str
    causal: bool
    queries: int | None
    keys: int | None


class Advisory(NamedTuple):
    """One known error; `packages` are distributions, each with the versions that have it."""

    kernels: tuple[str, ...]
    wrong: str
    reference: str
    archs: tuple[str, ...] = ()
    cudnn: tuple[tuple[int, ...], tuple[int, ...] | None] | None = None
    torch: tuple[tuple[int, ...], tuple[int, ...] | None] | None = None
    gradient: bool = False
    mask: str = ""
    causal: bool = True
    queries: int = 0
    keys: tuple[int, int] | None = None
    id: str = ""
    date: str = ""
    op: str = "attention"
    packages: tuple[tuple[str, str], ...] = ()

    def holds_on(self, platform: Platform) -> bool:
        """Say whether the versions and the device are concerned."""
        if platform.arch and self.archs and platform.arch not in self.archs:
            return False
        if all("cudnn" in kernel for kernel in self.kernels) and (not platform.cudnn or platform.arch == "cpu"):
            return False
        if not (_within(platform.cudnn, self.cudnn) and _within(platform.torch, self.torch)):
            return False
        return all(_installed(name, versions) for name, versions in self.packages)

    def concerns(self, kernel: str, call: AdvisedCall) -> bool:
        """Say whether a call by a kernel is, or may be, concerned, on a platform where the row holds."""
        if kernel not in self.kernels or (self.gradient and not call.gradient) or (call.causal and not self.causal):
            return False
        if (self.mask and call.mask != self.mask) or (self.queries and call.queries not in (self.queries, None)):
            return False
        return self.keys is None or call.keys is None or call.keys % self.keys[0] == self.keys[1]

    def __str__(self) -> str:
        dated = f"{self.reference}, {self.date}" if self.date else self.reference
        return f"{self.wrong} ({dated})"


def _within(version: tuple[int, ...], bounds: tuple[tuple[int, ...], tuple[int, ...] | None] | None) -> bool:
    if bounds is None:
        return True
    first, last = bounds
    return version[: len(first)] >= first and (last is None or version[: len(last)] <= last)


def _installed(name: str, versions: str) -> bool:
    from packaging.specifiers import SpecifierSet

    try:
        return SpecifierSet(versions).contains(metadata.version(name), prereleases=True)
    except metadata.PackageNotFoundError:
        return False


def advisories() -> tuple[Advisory, ...]:
    """Return all rows: those of this release, and those of the file that the variable names.

    Raises
    ------
    InputError
        The file cannot be read, or is no list of advisories.
    """
    path = os.environ.get(VARIABLE, "").strip()
    return ADVISORIES + (_of_file(path) if path else ())


@functools.lru_cache(maxsize=4)
def _of_file(path: str) -> tuple[Advisory, ...]:
    import msgspec
    import yaml

    try:
        document = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
        rows = msgspec.convert(document, dict[str, list[dict[str, Any]]])["advisories"]
        return tuple(_row(row) for row in rows)
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError, msgspec.ValidationError) as error:
        msg = f"{VARIABLE} names {path}, which cannot be used: {type(error).__name__}: {error}"
        fix = "write `advisories:` and below it a list of id, date, kernels, wrong, reference and what they hold for"
        raise InputError(msg, fix=fix) from None


def _row(stated: dict[str, Any]) -> Advisory:
    from packaging.specifiers import SpecifierSet

    row: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in stated.items()}
    unknown = [name for name in row if name not in _STATED]
    missing = [name for name in ("id", "kernels", "wrong", "reference") if not row.get(name)]
    if unknown or missing:
        raise ValueError(f"{row.get('id', 'an advisory')} has no {missing[0]}" if missing else f"unknown {unknown[0]}")
    packages = {name: str(SpecifierSet(versions)) for name, versions in row.pop("packages", {}).items()}
    row |= {"date": str(row.get("date", "")), "packages": tuple(packages.items())}
    return Advisory(**row)


#: What a row of a file may state; the version of PyTorch is among those of its packages.
_STATED = frozenset(Advisory._fields) - {"cudnn", "torch"}


def holding(platform: Platform, rows: Iterable[Advisory] | None = None) -> tuple[Advisory, ...]:
    """Return the rows whose versions and devices are those of a platform."""
    return tuple(row for row in (advisories() if rows is None else rows) if row.holds_on(platform))


#: Seen on an H200 with PyTorch 2.11 and cuDNN 9.19, beside what the trackers say.
ADVISORIES = (
    Advisory(
        kernels=("torch.cudnn", "cudnn.sdpa"),
        wrong=(
            "cuDNN's gradient for queries is NaN where the number of keys is 64 more than a multiple of 128 and all "
            "scores of a query are below about -89"
        ),
        reference="https://github.com/pytorch/pytorch/issues/196678",
        id="cudnn-gradient-of-queries",
        date="2026-09-11",
        archs=("sm90",),
        cudnn=((9, 19), (9, 25)),
        gradient=True,
        causal=False,
        keys=(128, 64),
    ),
    Advisory(
        kernels=("torch.cudnn", "cudnn.sdpa"),
        wrong="cuDNN's gradients for keys and values are NaN where there is one query and its scores are far below 0",
        reference="https://github.com/NVIDIA/cudnn-frontend/issues/1072",
        id="cudnn-gradient-of-one-query",
        archs=("sm90",),
        cudnn=((9, 19), None),
        gradient=True,
        queries=1,
    ),
    Advisory(
        kernels=("torch.cudnn",),
        wrong="a query that a boolean mask hides all keys from gets what cuDNN computes without the mask, instead of 0",
        reference="https://github.com/pytorch/pytorch/issues/177842",
        id="torch-cudnn-hidden-query",
        torch=((2, 10), (2, 11)),
        mask="boolean",
    ),
    Advisory(
        kernels=("torch.cudnn",),
        wrong="cuDNN reads an added mask of another type than the queries as if it were of theirs",
        reference="https://github.com/pytorch/pytorch/pull/191612",
        id="torch-cudnn-type-of-mask",
        torch=((2, 10), (2, 13)),
        mask="other",
    ),
)
