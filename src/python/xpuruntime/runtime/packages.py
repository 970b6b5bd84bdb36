# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Packages: those that are installed, how to install one that is missing, and plugins, which fail alone."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from xpuruntime.errors import XpuRuntimeError
from xpuruntime.files.reading import open_regular

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_FOLDER = re.compile(r"(?P<name>[^-]+(?:-[^-]+)*?)-(?P<version>\d[^-]*)(?:-py[\d.]+)?\.(?:dist|egg)-info")


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """One distribution: normalized name (lower case with hyphens), version, and where it is."""

    name: str
    version: str
    location: str
    record: str

    def files(self) -> tuple[str, ...] | None:
        """Return its files relative to `location`, or ``None`` when the installer kept no list."""
        import csv
        import io

        try:
            with open_regular(Path(self.record, "RECORD")) as raw, io.TextIOWrapper(raw, "utf-8", newline="") as file:
                return tuple(row[0] for row in csv.reader(file) if row)
        except (OSError, UnicodeDecodeError, csv.Error):
            return None


def distributions(paths: Sequence[str] | None = None) -> Iterator[Distribution]:
    """List what is installed in folders; default `sys.path`. A folder that cannot be read is passed over."""
    seen: set[str] = set()
    for path in sys.path if paths is None else paths:
        location = str(Path(path or "."))
        try:
            real = os.path.realpath(location)
            folder = _in_folder(location, os.stat(location).st_mtime_ns)  # noqa: PTH116 - in every run
        except OSError:
            continue
        if real in seen:
            continue
        seen.add(real)
        yield from folder


@functools.lru_cache(maxsize=256)
def _in_folder(location: str, changed: int) -> tuple[Distribution, ...]:
    del changed
    names = sorted(name for name in os.listdir(location) if name.endswith("-info"))  # noqa: PTH208 - every run
    return tuple(
        Distribution(
            name=re.sub(r"[-_.]+", "-", match["name"]).lower(),
            version=match["version"],
            location=location,
            record=os.path.join(location, name),  # noqa: PTH118 - of every distribution, in every run
        )
        for name in names
        if (match := _FOLDER.fullmatch(name))
    )


def installed(*names: str) -> dict[str, str]:
    """Return the versions of those distributions that are installed, by their normalized names."""
    versions = {
        distribution.name: distribution.version
        for distribution in reversed([*distributions()])
        if distribution.name in names
    }
    return {name: versions[name] for name in names if name in versions}


_PACKAGE = "xpuruntime"


@functools.cache
def install_command(extra: str) -> str:
    """Return the command that installs what an extra of this package requires on this platform, in backquotes.

    The packages are named themselves, because this package may have been installed from a checkout.
    """
    from importlib import metadata

    from packaging.requirements import Requirement

    try:
        stated = metadata.requires(_PACKAGE) or ()
    except metadata.PackageNotFoundError:
        stated = ()
    texts = [
        f'"{requirement.name}{_extras(requirement.extras)}{requirement.specifier}"'
        for requirement in map(Requirement, stated)
        if requirement.marker is not None
        and requirement.marker.evaluate({"extra": extra})
        and not requirement.marker.evaluate({"extra": ""})
    ]
    named = f"{_PACKAGE}[{extra}]"
    return f"`pip install {' '.join(texts)}` (the extra {named})" if texts else f'`pip install "{named}"`'


def _extras(extras: Collection[str]) -> str:
    return f"[{','.join(sorted(extras))}]" if extras else ""


def reinstall_command(options: str = "") -> str:
    """Return the command that builds and installs this package again, from where it came from."""
    import json
    from importlib import metadata

    try:
        text = metadata.distribution(_PACKAGE).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        text = None
    came = json.loads(text) if text else {}
    url = str(came.get("url", ""))
    if not url:
        return f"python -m pip install --force-reinstall --no-deps {options}{_PACKAGE}"
    editable = "--editable " if came.get("dir_info", {}).get("editable") else ""
    return f"python -m pip install --force-reinstall --no-deps {editable}{url.removeprefix('file://')}"


_Result = TypeVar("_Result")

#: Characters of an error's text.
_LONGEST = 500
_OURS = __name__.partition(".")[0]
#: Sentence by group and name of each plugin that failed to load in this process.
_failed: dict[tuple[str, str], str] = {}


def load_points(group: str, load: Callable[[EntryPoint], object]) -> Iterator[tuple[str, str]]:
    """Load every entry point of a group, in order of name; yield name with package, and reason, of those that fail.

    A plugin that exits, raises what is no `Exception`, or raises an error without a text fails as any other. What it
    prints on stdout goes to stderr, for on stdout may be the JSON of a command.
    """
    for point in _points(group):
        try:
            with contextlib.redirect_stdout(sys.stderr):
                load(point)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a package of somebody else may fail in any way
            name, reason = _named(point), error_text(error)
            _failed[group, name] = f"the plugin {name} of the group {group} failed to load: {reason}"
            yield name, reason


def _points(group: str) -> list[EntryPoint]:
    """Return the entry points of a group. Most installations have none, and then importlib.metadata is not imported."""
    others = any(hasattr(finder, "find_distributions") for finder in sys.meta_path if finder is not PathFinder)
    archives = any(os.path.isfile(path) for path in sys.path)  # noqa: PTH113 - on the way to every session
    if not others and not archives and not any(_states(distribution, group) for distribution in distributions()):
        return []
    from importlib import metadata

    return sorted(metadata.entry_points(group=group), key=lambda point: (point.name, point.value))


def _states(distribution: Distribution, group: str) -> bool:
    path = os.path.join(distribution.record, "entry_points.txt")  # noqa: PTH118 - of every distribution
    if not os.path.exists(path):  # noqa: PTH110 - costs a fifth of an error
        return False
    try:
        with open_regular(path) as file:
            return group.encode() in file.read()
    except OSError:
        return False


def failed_plugins() -> tuple[str, ...]:
    """Return a sentence for each plugin that failed to load in this process."""
    return tuple(_failed.values())


def guarded(owner: object, call: Callable[[], _Result], failed: Callable[[str], _Result]) -> _Result:
    """Call a method of an object, and where it is a plugin's and fails, return what `failed` makes of the reason.

    What a plugin prints on stdout goes to stderr. Errors of `xpuruntime.errors` and of objects of this package go on.
    """
    if type(owner).__module__.partition(".")[0] == _OURS:
        return call()
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return call()
    except (KeyboardInterrupt, XpuRuntimeError):
        raise
    except BaseException as error:
        return failed(error_text(error))


def error_text(error: BaseException) -> str:
    """Return class and text of an error of somebody else's, whose text may itself raise; of one of ours, the text."""
    if isinstance(error, XpuRuntimeError) and str(error):
        return str(error)[:_LONGEST]
    kind = type(error).__name__
    try:
        text = str(error)[:_LONGEST]
    except KeyboardInterrupt:
        raise
    except BaseException:
        text = "an error whose text cannot be shown"
    if isinstance(error, SystemExit):
        return f"it exits with {text or 'code 0'} when it is loaded"
    return f"{kind}: {text}" if text else kind


def _named(point: EntryPoint) -> str:
    try:
        package = f" of {point.dist.name} {point.dist.version}" if point.dist is not None else ""
    except Exception:  # damaged metadata
        package = ""
    return f"{point.name!r}{package}"
