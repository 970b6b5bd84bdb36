# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Read-back of a compiled model: properties as OpenVINO holds them, in the words a policy uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xpuruntime.engines.control_builder import show
from xpuruntime.engines.openvino.options import NAMES
from xpuruntime.policies.compound_kinds import split_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from xpuruntime.engines.openvino.settings import OpenVinoSettings

__all__ = ["effective", "read_back", "word"]

#: Names of enumerations that differ from what OpenVINO takes.
_WORDS = {"ERR": "LOG_ERROR", "NO": "LOG_NONE"}


def word(value: Any) -> str:
    """Return a property's value as one writes it: ``"f32"``, ``"YES"``, ``"LATENCY"``, ``"2"``."""
    if isinstance(value, bool):
        return "YES" if value else "NO"
    name = getattr(value, "name", None)  # an enumeration
    if isinstance(name, str):
        return _WORDS.get(name, name)
    if hasattr(value, "to_string"):  # a type
        return str(value.to_string())
    return str(value)


def read_back(compiled: Any, name: str) -> str | None:
    """Return what a compiled model holds for a property, or ``None`` where it does not tell."""
    try:
        return word(compiled.get_property(name))
    except RuntimeError:
        return None


def effective(
    compiled: Any, settings: OpenVinoSettings, device: str, stated: Mapping[str, Sequence[int | str]]
) -> dict[str, str]:
    """Return policy key to value, for what can be read back."""
    found = {"execution.engine": NAMES[0], "execution.device": device}
    threads = read_back(compiled, "INFERENCE_NUM_THREADS")
    if threads is not None:
        found["execution.threads"] = f"INFERENCE_NUM_THREADS={threads}"
    shapes = {port.get_any_name(): port.get_partial_shape() for port in compiled.inputs}
    if all(shape.is_static for shape in shapes.values()):
        found["execution.static_shape"] = "all sizes are fixed"
    for name, sizes in stated.items():
        if name in shapes:
            same = _limits(shapes[name]) == [split_size(size)[::2] for size in sizes]
            found[f"execution.shapes.{name}"] = show(sizes) if same else str(shapes[name])
    for name in settings.properties:
        value = read_back(compiled, name)
        if value is not None:
            for alias in NAMES:
                found[f"execution.provider_options.{alias}.{name}"] = value
    return found


def _limits(shape: Any) -> list[tuple[int, int]]:
    return [(int(dim.get_min_length()), int(dim.get_max_length())) for dim in shape]
