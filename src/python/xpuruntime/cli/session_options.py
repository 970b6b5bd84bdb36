# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`SessionOptions`: options of every command that opens a session, and the decorator that adds them to one."""

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

__all__ = ["SessionOptions", "with_session_options"]


class SessionOptions(NamedTuple):
    """Policy, device, engine, precision and calibration inputs, each ``None`` where the policy decides; and trust."""

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


def with_session_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of `SessionOptions` to a command: they fill its parameter ``session_options``."""
    stated = inspect.signature(command, eval_str=True)
    hints = get_type_hints(SessionOptions, include_extras=True)
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[name])
        for name, default in SessionOptions._field_defaults.items()
    ]
    shown = [one for own in stated.parameters.values() for one in (options if own.name == "session_options" else [own])]

    @wraps(command)
    def wrapped(*first: Any, **given: Any) -> Any:
        session_options = SessionOptions(**{name: given.pop(name) for name in SessionOptions._fields})
        return command(*first, session_options=session_options, **given)

    wrapped.__signature__ = stated.replace(parameters=shown)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {one.name: one.annotation for one in shown}
    return wrapped
