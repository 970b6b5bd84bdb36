# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Choice`: what the options that every session takes say, and how a command gets one."""

from __future__ import annotations

import inspect
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple, get_type_hints

from xpuruntime.cli.options import (
    CalibrationOption,
    DeviceOption,
    EngineOption,
    PolicyOption,
    PrecisionOption,
    TrustOption,
)

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Choice", "choosing"]


class Choice(NamedTuple):
    """Policy, device, engine, precision and calibration inputs, ``None`` leaves it to the policy; and trust."""

    policy: PolicyOption = None
    device: DeviceOption = None
    engine: EngineOption = None
    precision: PrecisionOption = None
    calibration: CalibrationOption = None
    trust: TrustOption = False

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `InferenceSession` and of `plan`. Engines may be a list with commas."""
        names = self.engine.split(",") if self.engine and "," in self.engine else self.engine
        return {**self._asdict(), "engine": names}


def choosing(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of a `Choice`, in the place of its parameter ``choice``, which gets what they say."""
    stated = inspect.signature(command, eval_str=True)
    hints = get_type_hints(Choice, include_extras=True)
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[name])
        for name, default in Choice._field_defaults.items()
    ]
    shown = [one for own in stated.parameters.values() for one in (options if own.name == "choice" else [own])]

    @wraps(command)
    def chosen(*first: Any, **given: Any) -> Any:
        choice = Choice(**{name: given.pop(name) for name in Choice._fields})
        return command(*first, choice=choice, **given)

    chosen.__signature__ = stated.replace(parameters=shown)  # type: ignore[attr-defined]
    chosen.__annotations__ = {one.name: one.annotation for one in shown}
    return chosen
