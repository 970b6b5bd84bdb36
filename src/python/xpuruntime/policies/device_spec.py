# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Devices and engines as a policy names them, and the options handed to one engine as they are."""

from __future__ import annotations

import math
import re
from typing import Any, Literal

from xpuruntime.errors import PolicyError
from xpuruntime.policies.compound_kinds import FrozenDict, MappingOf, read_entries
from xpuruntime.policies.document import MappingNode, Node, Refused, ScalarNode, describe, did_you_mean, nearest, quote
from xpuruntime.policies.kinds import Choice, Integer, Text, refuse_control_characters
from xpuruntime.policies.value import PolicyValue, field

__all__ = [
    "DEVICE_PATTERN",
    "ENGINE_PATTERN",
    "DeviceKind",
    "DeviceSpec",
    "DeviceText",
    "ProviderOptions",
    "check_device",
    "check_engine",
]

DeviceKind = Literal["cpu", "cuda", "gpu", "npu", "rocm", "metal", "dml", "auto"]

_KINDS: tuple[DeviceKind, ...] = ("cpu", "cuda", "gpu", "npu", "rocm", "metal", "dml", "auto")
_INDEXED = ("cuda", "gpu", "npu", "rocm", "dml")
_MOST = 1023
_INDEX = "0|[1-9][0-9]{0,18}"
DEVICE_PATTERN = f"^({'|'.join(_KINDS)}|({'|'.join(_INDEXED)}):(0|[1-9][0-9]{{0,3}}))$"


class DeviceSpec(PolicyValue, frozen=True, kw_only=True):
    """A device as a policy names it: a kind, and for some kinds an index.

    Whether the device is there is a question for planning, not for this value.
    """

    kind: DeviceKind = field(Choice(_KINDS, "Kind of device.", what="kinds"))
    index: int | None = field(Integer(0, _MOST, "Index of the device, from 0."), default=None)

    def _check_together(self) -> None:
        """Refuse an index for a kind that has none."""
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
        if int(index) > _MOST:
            raise Refused(
                f"{quote(text)} is not a device: its index is above {_MOST}. Fix: write '{kind}:0' for the first"
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
