# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Devices, engines and their options as a policy names them, `MemoryPolicy` and `ArtifactPolicy`."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from typing import Any, Literal, get_args

from xpuruntime.errors import InputError, PolicyError
from xpuruntime.policies.compound_kinds import FrozenDict, MappingOf, read_entries
from xpuruntime.policies.document import (
    MappingNode,
    Node,
    Refused,
    ScalarNode,
    describe,
    describe_value,
    did_you_mean,
    nearest,
    quote,
)
from xpuruntime.policies.kinds import Choice, FilePath, Integer, Text, refuse_control_characters
from xpuruntime.policies.value import Accepts, PolicyValue, field

DeviceKind = Literal["cpu", "cuda", "gpu", "npu", "rocm", "metal", "dml", "auto"]

_KINDS: tuple[DeviceKind, ...] = ("cpu", "cuda", "gpu", "npu", "rocm", "metal", "dml", "auto")
_INDEXED = ("cuda", "gpu", "npu", "rocm", "dml")
_MOST_INDEX = 1023
_INDEX = "0|[1-9][0-9]{0,18}"
DEVICE_PATTERN = f"^({'|'.join(_KINDS)}|({'|'.join(_INDEXED)}):(0|[1-9][0-9]{{0,3}}))$"


class DeviceSpec(PolicyValue, frozen=True, kw_only=True):
    """A device as a policy names it: a kind, and for some kinds an index.

    Whether the device is there is a question for planning, not for this value.
    """

    kind: DeviceKind = field(Choice(_KINDS, "Kind of device.", what="kinds"))
    index: int | None = field(Integer(0, _MOST_INDEX, "Index of the device, from 0."), default=None)

    def _check_together(self) -> None:
        if self.index is not None and self.kind not in _INDEXED:
            raise Refused(f"'{self.kind}' takes no index. Fix: write '{self.kind}'", "index")

    @classmethod
    def parse(cls, text: str) -> DeviceSpec:
        """Read ``"cpu"``, ``"cuda"``, ``"cuda:0"``, ..."""
        try:
            return cls._parse(text)
        except Refused as refused:
            raise PolicyError(refused.message()) from None

    @classmethod
    def _parse(cls, text: Any) -> DeviceSpec:
        if not isinstance(text, str):
            raise Refused(f"got {type(text).__name__} {text!r:.40}. Fix: state text such as 'cpu' or 'cuda:0'")
        kind, colon, index = text.partition(":")
        if kind not in _KINDS:
            near = nearest(kind, _KINDS)
            meant = f"{near}{colon}{index}" if near and len(index) < 8 else None
            raise Refused(f"{quote(text)} is not a device{did_you_mean(kind, _KINDS, 'kinds', near=meant)}")
        if not colon:
            return cls(kind=kind)
        if kind not in _INDEXED:
            raise Refused(f"{quote(text)} is not a device: '{kind}' takes no index. Fix: write '{kind}'")
        if not re.fullmatch(_INDEX, index):
            reason = "negative" if re.fullmatch("-[0-9]+", index) else f"{quote(index)}, which is not a whole number"
            raise Refused(f"{quote(text)} is not a device: its index is {reason}. Fix: write '{kind}:0' for the first")
        if int(index) > _MOST_INDEX:
            raise Refused(
                f"{quote(text)} is not a device: its index is above {_MOST_INDEX}. Fix: write '{kind}:0' for the first"
            )
        return cls(kind=kind, index=int(index))

    def __str__(self) -> str:
        return self.kind if self.index is None else f"{self.kind}:{self.index}"


class DeviceText(Text):
    """A device as text; the constructor also takes a `DeviceSpec`."""

    def __init__(self, doc: str, *, optional: bool = False) -> None:
        what = "a device such as 'cpu' or 'cuda:0'"
        super().__init__(doc, what=what, parse=check_device, pattern=DEVICE_PATTERN, optional=optional)

    def _check(self, value: Any) -> Any:
        return super()._check(str(value) if isinstance(value, DeviceSpec) else value)


def check_device(text: str) -> str:
    """Return `text` if it names a device. Raises `Refused`."""
    return str(DeviceSpec._parse(text))


_ENGINE = "[A-Za-z][A-Za-z0-9_-]{0,63}"
ENGINE_PATTERN = f"^{_ENGINE}$"
_LEAST_OPTION, _MOST_OPTION = -(2**63), 2**64 - 1


def check_engine(name: str) -> str:
    """Return `name` if it can be the name of an engine. Raises `Refused`."""
    if not re.fullmatch(_ENGINE, name):
        raise Refused(
            f"{quote(name)} cannot be the name of an engine. Fix: write letters, digits, '_' and '-', starting with a "
            f"letter; a device is stated under 'device'"
        )
    return name


class ProviderOptions(MappingOf):
    """Engine name to option name to text, number, true or false. Sorted; engines without options are left out."""

    def expects(self) -> str:
        """Say what is accepted."""
        return "a mapping of engine to a mapping of options, such as {onnxruntime: {name: value}}"

    def _read(self, node: Node) -> FrozenDict:
        return FrozenDict({engine: options for engine, options in super()._read(node).items() if options})

    def _check_name(self, name: str) -> None:
        check_engine(name)

    def _read_value(self, node: Node) -> FrozenDict:
        if not isinstance(node, MappingNode):
            raise Refused(f"got {describe(node)}. Fix: state a mapping of options, such as {{name: value}}")
        return read_entries(node, _check_option, _read_option)

    def plain(self, value: Any) -> Any:
        """Return the value as it is written to a file."""
        return {engine: dict(options) for engine, options in value.items()}

    def _schema(self) -> dict[str, Any]:
        scalar = {"type": ["string", "number", "boolean"]}
        return {
            "type": "object",
            "propertyNames": {"pattern": ENGINE_PATTERN},
            "additionalProperties": {
                "type": "object",
                "propertyNames": {"pattern": r"\S"},
                "additionalProperties": scalar,
            },
        }


def _check_option(name: str) -> None:
    if not name.strip():
        raise Refused("an option needs a name. Fix: write {name: value}")
    refuse_control_characters(name)


def _read_option(node: Node) -> str | int | bool | float:
    if not isinstance(node, ScalarNode) or node.value is None:
        raise Refused(f"got {describe(node)}. Fix: state text, a number, true or false")
    value: str | int | bool | float = node.value
    if isinstance(value, str):
        refuse_control_characters(value)
    elif not isinstance(value, bool):
        if isinstance(value, float) and not math.isfinite(value):
            raise Refused("is not a finite number. Fix: state a finite number")
        if isinstance(value, int) and not _LEAST_OPTION <= value <= _MOST_OPTION:
            raise Refused(f"is out of range. Fix: state a number from {_LEAST_OPTION} to {_MOST_OPTION}")
    return value


Pool = Literal["engine", "direct", "caching", "driver"]

_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_SIZE = r"([0-9]{1,19})(?:\.([0-9]{1,12}))?\s*([A-Za-z]*)"
_MOST = 2**63 - 1


class ByteSize(Text):
    """A number of bytes: a whole number, or text with a unit such as ``"8GiB"`` (2**30) or ``"512MB"`` (10**6)."""

    def __init__(self, doc: str = "", *, optional: bool = False) -> None:
        super().__init__(doc, what="a size such as '8GiB', '512MB', or a number of bytes", optional=optional)

    def _check(self, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            size = int(value)
        else:
            size = self._parse_size(super()._check(value).strip())
        if not 1 <= size <= _MOST:
            raise Refused(f"{describe_value(value)} is out of range. Fix: state a size from 1 byte to 2**63 - 1 bytes")
        return size

    def _read(self, node: Any) -> Any:
        if isinstance(getattr(node, "value", None), int):
            return self._check(node.value)
        return super()._read(node)

    def _parse_size(self, text: str) -> int:
        match = re.fullmatch(_SIZE, text)
        if match is None:
            raise Refused(f"{quote(text)} is not a size. Fix: state {self.expects()}")
        integer, fraction, unit = match[1], match[2] or "", match[3]
        if unit not in _UNITS:
            near = nearest(f"{unit}B" if len(unit) == 1 else unit, _UNITS)
            meant = f"{text.removesuffix(unit).strip()}{near}" if near and unit else None
            what = f"unit {unit!r} is not known" if unit else "no unit is given"
            raise Refused(f"{quote(text)} is not a size: {what}{did_you_mean(text, _UNITS, 'units', near=meant)}")
        size: int
        size, rest = divmod(int(integer + fraction) * _UNITS[unit], 10 ** len(fraction))
        if rest:
            raise Refused(f"{quote(text)} is not a whole number of bytes. Fix: state a smaller unit")
        return size

    def plain(self, value: Any) -> Any:
        """Return the value as it is written to a file."""
        return None if value is None else format_bytes(value)

    def _schema(self) -> dict[str, Any]:
        pattern = f"^\\s*[0-9]{{1,19}}(\\.[0-9]{{1,12}})?\\s*({'|'.join(_UNITS)})\\s*$"
        return {"anyOf": [{"type": "integer", "minimum": 1, "maximum": _MOST}, {"type": "string", "pattern": pattern}]}


def format_bytes(size: int) -> int | str:
    """Return ``"8GiB"`` for whole KiB, MiB, GiB or TiB, else the number itself. `ByteSize` reads both back exactly."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size % _UNITS[unit] == 0:
            return f"{size // _UNITS[unit]}{unit}"
    return size


def read_size(value: int | str, what: str) -> int:
    """Return the bytes of a size such as ``"8GiB"``. Raises InputError, in which `what` names the argument."""
    try:
        size: int = ByteSize().check(value)
    except Refused as refused:
        raise InputError(f"{what}: {refused.message()}") from None
    return size


class MemoryPolicy(PolicyValue, frozen=True, kw_only=True):
    """Which pool serves device memory, and how much of it.

    Attributes
    ----------
    pool : {"engine", "direct", "caching", "driver"}
        ``engine``: the engine's own allocator. ``caching``: xpuruntime's caching pool. ``driver``: the driver's
        stream-ordered pool. ``direct``: no pool, every allocation goes to the driver.
    limit : int or None
        Most bytes in use at once; ``None`` for no limit. The constructor also takes text such as ``"8GiB"`` or
        ``"512MB"``.

    Examples
    --------
    >>> MemoryPolicy(pool="caching", limit="8GiB")
    MemoryPolicy(pool='caching', limit=8589934592)
    """

    pool: Pool = field(Choice(get_args(Pool), "Who serves device memory.", what="pools"), default="engine")
    limit: Accepts[int | None, int | str | None] = field(
        ByteSize("Most device memory in use at once, such as '8GiB' or '512MB'."), default=None
    )


Stale = Literal["error", "rebuild"]

_WORDS = ("off", "default")


class Folder(FilePath):
    """``"off"``, ``"default"``, or the path of a folder: text with a ``/`` in it, so that no misspelt word is one."""

    def __init__(self, doc: str) -> None:
        super().__init__(
            doc,
            what="'off', 'default', or a folder such as './cache'",
            parse=_check_folder,
            pattern=_PATTERN,
            words=_WORDS,
        )

    def _check(self, value: Any) -> Any:
        return super()._check(os.fspath(value) if isinstance(value, os.PathLike) else value)

    def relocate(self, value: Any, move: Callable[[str], str]) -> Any:
        """Return the path as `move` changes it, with a ``/`` in it."""
        moved = super().relocate(value, move)
        return moved if moved in _WORDS or "/" in moved or "\\" in moved else f"./{moved}"


_PATTERN = r"^(off|default)$|[/\\]"


def _check_folder(text: str) -> str:
    if text not in _WORDS and "/" not in text and "\\" not in text:
        raise Refused(
            f"{quote(text)} is neither 'off', 'default' nor a path{did_you_mean(text, _WORDS, 'words')}, "
            f"or './{text[:40]}' for a folder of that name"
        )
    return text


class ArtifactPolicy(PolicyValue, frozen=True, kw_only=True):
    """Where compiled models are kept, and what happens to one that does not fit.

    Attributes
    ----------
    cache : str
        ``"off"``: nothing is kept. ``"default"``: the cache folder of the user. Otherwise the path of a folder, which
        has a ``/`` in it; the constructor also takes a ``pathlib.Path``. In a policy file it is relative to the folder
        of that file; in a value that was made otherwise, to the current folder.
    stale : {"error", "rebuild"}
        What happens when a compiled model is there that was made for another model, version, policy or device, or is
        damaged. ``error``: it is refused, with the reason. ``rebuild``: it is made again, and the report says so.

    Examples
    --------
    >>> ArtifactPolicy(cache="default", stale="rebuild")
    ArtifactPolicy(cache='default', stale='rebuild')
    """

    cache: Accepts[str, str | os.PathLike[str]] = field(
        Folder(
            "Where compiled models are kept: 'off', 'default', or a folder such as './cache', which is relative to the "
            "policy file."
        ),
        default="off",
    )
    stale: Stale = field(
        Choice(get_args(Stale), "What happens to a compiled model that does not fit."), default="error"
    )
