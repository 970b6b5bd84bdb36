# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Provider options: settings handed to one engine as they are, as a frozen mapping."""

from __future__ import annotations

import math
import re
from typing import Any

from xpuruntime.policies.document import Mapping, Node, Scalar, describe, from_python
from xpuruntime.policies.frozen_dict import FrozenDict
from xpuruntime.policies.kinds import Kind, refuse_control_characters
from xpuruntime.policies.refusal import Refused, quote

__all__ = ["ENGINE_PATTERN", "ProviderOptions", "check_engine"]

_ENGINE = re.compile("[A-Za-z][A-Za-z0-9_-]{0,63}")
ENGINE_PATTERN = f"^{_ENGINE.pattern}$"
_LEAST, _MOST = -(2**63), 2**64 - 1


def check_engine(name: str) -> str:
    """Return `name` if it can be the name of an engine. Raises `Refused`."""
    if not _ENGINE.fullmatch(name):
        raise Refused(
            f"{quote(name)} cannot be the name of an engine: letters, digits, '_' and '-', starting with a letter; "
            f"a device is stated under 'device'"
        )
    return name


class ProviderOptions(Kind):
    """Engine name to option name to text, number, true or false. Sorted; engines without options are left out."""

    def expects(self) -> str:
        """Say what is accepted."""
        return "a mapping of engine to a mapping of options, such as {onnxruntime: {name: value}}"

    def _check(self, value: Any) -> FrozenDict:
        if not isinstance(value, dict):
            raise self.wrong_type(f"a {type(value).__name__}")
        return self._read(from_python(value))

    def _read(self, node: Node) -> FrozenDict:
        if not isinstance(node, Mapping):
            raise self.wrong_type(describe(node))
        engines = {}
        for engine, (key_node, options_node) in sorted(node.entries.items()):
            try:
                check_engine(engine)
            except Refused as refused:
                raise refused.at(key_node) from None
            try:
                if not isinstance(options_node, Mapping):
                    raise Refused(f"expected a mapping of options, got {describe(options_node)}")
                engines[engine] = _read_options(options_node)
            except Refused as refused:
                raise refused.at(options_node).under(engine) from None
        return FrozenDict({engine: options for engine, options in engines.items() if options})

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


def _read_options(node: Mapping) -> FrozenDict:
    options = {}
    for name, (key_node, value_node) in sorted(node.entries.items()):
        try:
            if not name.strip():
                raise Refused("an option needs a name")
            refuse_control_characters(name)
        except Refused as refused:
            raise refused.at(key_node) from None
        try:
            options[name] = _read_option(value_node)
        except Refused as refused:
            raise refused.at(value_node).under(name) from None
    return FrozenDict(options)


def _read_option(node: Node) -> str | int | bool | float:
    if not isinstance(node, Scalar) or node.value is None:
        raise Refused(f"expected text, a number, true or false, got {describe(node)}")
    value: str | int | bool | float = node.value
    if isinstance(value, str):
        refuse_control_characters(value)
    elif not isinstance(value, bool):
        if isinstance(value, float) and not math.isfinite(value):
            raise Refused("is not a finite number")
        if isinstance(value, int) and not _LEAST <= value <= _MOST:
            raise Refused(f"is out of range; expected a number from {_LEAST} to {_MOST}")
    return value
