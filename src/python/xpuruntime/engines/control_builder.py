# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Control builder: one control for each policy key that is stated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.errors import PolicyError
from xpuruntime.evidence.records import Control, Enforceability
from xpuruntime.policies.document import nearest, question

if TYPE_CHECKING:
    from xpuruntime.engines.base import Request
    from xpuruntime.policies.kernel_rules import KernelRule

#: What a kernel key is resolved to where the policy leaves the choice to the engine.
ENGINE_CHOICE = "the engine's choice"

#: What becomes of the accuracy keys, here and in the evidence.
PROBED = "probe input compared with fp32 on the CPU"
#: The one reference that probe inputs are compared with.
REFERENCE = "onnxruntime.cpu.fp32"


class ControlBuilder:
    """Collects one control for each stated key."""

    def __init__(self, stated: dict[str, Any]) -> None:
        self.stated = stated
        self.controls: list[Control] = []

    def add(self, key: str, resolved: str, level: Enforceability, reason: str, fix: str | None = None) -> None:
        """Add the control of `key`, if the policy states it."""
        if key in self.stated:
            requested = show(self.stated[key])
            self.controls.append(
                Control(key=key, requested=requested, resolved=resolved, enforceability=level, reason=reason, fix=fix)
            )

    def common(self, request: Request, engine: str, *, checked: str) -> None:
        """Add the keys that mean the same for every engine: engine, device, fallback and the stated accuracy."""
        execution = request.policy.execution
        self.add("execution.engine", engine, "enforced", "the session runs on this engine and no other")
        if not any(control.key == "execution.device" for control in self.controls):
            self.add("execution.device", request.device, "enforced", checked)
        self.add(
            "execution.fallback",
            show(execution.fallback),
            "enforced",
            "the plan changes engine or device only as listed",
        )
        self.add(
            "execution.static_batch",
            f"every run has {execution.static_batch} rows",
            "enforced",
            "smaller batches are padded; that rows do not depend on each other is tested on probe inputs at opening",
        )
        wanted = request.policy.accuracy
        for key in self.stated:
            if key == "accuracy.reference" and wanted is not None and wanted.reference != REFERENCE:
                fix = f"state reference: {REFERENCE}"
                self.add(key, REFERENCE, "unsupported", f"the reference of this engine is {REFERENCE}", fix)
            elif key.startswith("accuracy."):
                self.add(key, PROBED, "enforced", "the session is refused beyond the tolerance")
            elif key.startswith("calibration."):
                self.add(key, show(self.stated[key]), "enforced", "inputs of another digest or number are refused")

    def shapes(self, request: Request, ranged: str) -> None:
        """Add the shapes stated, one key an input."""
        for name, sizes in request.policy.execution.shapes.items():
            fixed = not any(isinstance(size, str) for size in sizes)
            reason = "the sizes are fixed in the graph" if fixed else ranged
            self.add(f"execution.shapes.{name}", show(sizes), "enforced", f"{reason}, and every call is checked")
        self.add("execution.static_shape", "all sizes are fixed", "enforced", "the plan refuses a model with open ones")

    def determinism(self, request: Request, resolved: str, level: Enforceability, reason: str) -> None:
        """Add the grade of determinism."""
        grade = request.policy.execution.determinism
        if grade != "run_to_run":
            level = "advisory" if level == "enforced" else level
            reason = f"{reason}; that covers run_to_run, and {grade} is not promised: test it with `xrt determinism`"
        if grade == "batch_invariant" and request.policy.execution.static_batch is not None:
            reason = f"{reason}; under execution.static_batch it takes no more of the engine than batch_position"
        self.add("execution.determinism", resolved, level, reason)

    def options(self, where: str, names: tuple[str, ...], handed: str) -> None:
        """Add the provider options: those of this engine, and those a portable policy holds for others.

        Those that were added before are left as they are.
        """
        head = where.rpartition(".")[0] + "."
        present = {control.key for control in self.controls}
        for key, value in self.stated.items():
            if not key.startswith(head) or key in present:
                continue
            engine = key.removeprefix(head).partition(".")[0]
            if engine in names:
                self.add(key, show(value), "enforced", handed)
            else:
                self.add(key, "-", "enforced", f"used when {engine} runs, and only then")

    def finish(self, engine: str) -> tuple[Control, ...]:
        """Return the controls; a stated key that none was added for is one that the engine has no means for."""
        present = {control.key for control in self.controls}
        for key in self.stated:
            if key not in present and key != "mode":
                self.add(key, "-", "unsupported", f"{engine} has no such setting")
        return tuple(self.controls)


def fp32_nodes(rule: KernelRule) -> str | None:
    """Return the nodes, as a glob, of a rule that asks for no kernel and only keeps nodes in fp32; else ``None``.

    Such a rule can be held wherever the engine's graph is converted or quantized here.
    """
    free = rule.use in (None, "auto", ("auto",))
    return rule.match.node or None if free and rule.precision == "fp32" else None


def show(value: Any) -> str:
    """Return a policy value as a policy file would write it."""
    if hasattr(value, "to_plain"):
        import json

        return json.dumps(value.to_plain(), ensure_ascii=False)
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(show(v) for v in value) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)


#: The words of an option that is on or off; ``true`` and ``false`` of a policy become these.
BOOL = ("0", "1")


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One vendor option."""

    meaning: str
    values: tuple[str, ...] | None = None
    low: int = 0
    high: int = 2**63 - 1
    text: bool = False
    owned_by: str | None = None
    search: tuple[str, ...] = ()
    search_first: bool = False
    needs: dict[str, tuple[str, ...]] = {}


def own_options(options_by_engine: Mapping[str, Mapping[str, object]], names: tuple[str, ...]) -> dict[str, object]:
    """Return the ``execution.provider_options`` of an engine, under any of its `names`; the first is its own."""
    merged: dict[str, object] = {}
    for name in names:
        options = options_by_engine.get(name, {})
        twice = sorted(merged.keys() & options.keys())
        if twice:
            msg = f"execution.provider_options: {twice[0]!r} is given under two names of one engine; keep one of them"
            raise PolicyError(msg, engine=names[0])
        merged.update(options)
    return merged


def check_options(
    options: Mapping[str, object], known: Mapping[str, Option], where: str, also: Mapping[str, Option] | None = None
) -> dict[str, str]:
    """Return `given` as the strings the vendor takes."""
    engine = where.rpartition(".")[2]
    checked: dict[str, str] = {}
    for name, value in options.items():
        option = known.get(name)
        if option is None:
            names = sorted({*known, *(also or {})})
            near = nearest(name, names) or next((n for n in names if n.endswith(f".{name}")), None)
            msg = f"{where}: unknown option {name!r}{question(near, '.')} Known: {', '.join(names)}"
            raise PolicyError(msg, fix=f"write {near or 'one of these'}", engine=engine)
        if option.owned_by is not None:
            msg = f"{where}: {name!r} is set by {option.owned_by}. Fix: state it there, so that one fact has one place"
            raise PolicyError(msg, engine=engine)
        checked[name] = _text(name, value, option, where, engine)
    return checked


def _word(value: bool, option: Option) -> str:
    return str(value).lower() if "true" in (option.values or ()) else str(int(value))


def _text(name: str, value: object, option: Option, where: str, engine: str) -> str:
    text = _word(value, option) if isinstance(value, bool) else str(value)
    if option.text:
        if isinstance(value, bool) or not text.strip():
            msg = f"{where}.{name}: {text!r} is not text ({option.meaning})"
            raise PolicyError(msg, engine=engine)
        return text
    if option.values is not None:
        if text not in option.values:
            msg = (
                f"{where}.{name}: {text!r} is not one of {', '.join(repr(v) for v in option.values)} ({option.meaning})"
            )
            raise PolicyError(msg, engine=engine)
        return text
    try:
        number = int(text)
    except ValueError:
        msg = f"{where}.{name}: {text!r} is not an integer ({option.meaning})"
        raise PolicyError(msg, engine=engine) from None
    if not option.low <= number <= option.high:
        msg = f"{where}.{name}: {number} is outside {option.low}..{option.high} ({option.meaning})"
        raise PolicyError(msg, engine=engine)
    return str(number)
