# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Provider options: settings handed to one engine as they are, as a frozen mapping."""

from __future__ import annotations

import math
import re
from typing import Any

from xpuruntime.policies.compound_kinds import MappingOf, read_entries
from xpuruntime.policies.document import MappingNode, Node, ScalarNode, describe
from xpuruntime.policies.frozen_dict import FrozenDict
from xpuruntime.policies.kinds import refuse_control_characters
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
            raise Refused(f"expected a mapping of options, got {describe(node)}")
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
        raise Refused("an option needs a name")
    refuse_control_characters(name)


def _read_option(node: Node) -> str | int | bool | float:
    if not isinstance(node, ScalarNode) or node.value is None:
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
