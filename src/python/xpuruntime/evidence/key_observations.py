# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`observations`: for each policy key what was asked, what was resolved and what ran, and whether it was honoured."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from xpuruntime.evidence.records import Control, KeySeen, Observation, Status, Unit

#: Words in an engine's operator name by which a policy key finds its units.
_FAMILIES = {
    "matmul": ("matmul", "gemm"),
    "attention": ("attention", "sdpa"),
    "layer_norm": ("layernorm", "layernormalization"),
    "rms_norm": ("rmsnorm", "rmsnormalization", "simplifiedlayernorm"),
    "conv": ("conv",),
}


def observe_kernels(control: Control, effective: Mapping[str, str], units: Sequence[Unit]) -> tuple[str, Status, str]:
    """Compare one ``kernels.*`` key with the units that ran."""
    family = control.key.removeprefix("kernels.")
    words = _FAMILIES.get(family)
    concerned = list(units) if words is None else [u for u in units if any(w in _flat(u.op) for w in words)]
    idle = control.enforceability != "unsupported" and control.resolved == "-"
    if idle and not (words is not None and concerned):
        return "-", "unobservable", control.reason
    wanted = [_flat(w.rpartition(".")[2]) for w in re.split(r"[,\s\[\]()'\"]+", control.requested) if w]
    if control.key in effective and (words is None or all(u.kernel is None for u in concerned)):
        value = effective[control.key]
        if value in (control.resolved, control.requested) or {_flat(v) for v in value.split(",")} <= set(wanted):
            return value, "honoured", "read back from the engine"
        return value, "substituted", "the engine reads back another value"
    if words is None and control.key == "kernels.auto_strategy":
        return "-", "unobservable", "a way of choosing leaves no trace of its own"
    if not concerned:
        return "-", "unobservable", f"no {family} unit ran: the engine may have run it as other operators"
    if words is None:
        # Which units a rule concerns is for the engine to say: it puts the answer in `effective`.
        return "-", "unobservable", "the engine does not say which units this rule reached"
    silent = [u for u in concerned if u.kernel is None or u.kernel_source == "unknown"]
    if len(silent) == len(concerned):
        set_as = "" if control.resolved in ("", "-") else f" ({control.resolved} was set)"
        return (
            f"kernel unknown in {len(silent)} units",
            "unobservable",
            f"{concerned[0].engine} does not report which kernel ran{set_as}",
        )
    ran = sorted({u.kernel for u in concerned if u.kernel})
    other = [u for u in concerned if u.kernel and not any(w in _flat(u.kernel) for w in wanted)]
    observed = ", ".join(ran)
    if other:
        return (
            observed,
            "substituted",
            f"{len(other)} of {len(concerned)} units ran another kernel, such as {other[0].kernel}",
        )
    if silent:
        return observed, "unobservable", f"{len(silent)} of {len(concerned)} units do not report their kernel"
    guessed = any(u.kernel_source == "inferred" for u in concerned)
    if guessed:
        return observed, "unobservable", "the kernel was inferred from its surroundings, not reported"
    return observed, "honoured", f"all {len(concerned)} units ran it"


def _flat(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


_FLOATS = frozenset({"fp64", "fp32", "fp16", "bf16", "fp8"})
_TRUE = frozenset({"true", "1", "yes", "on"})
_FALSE = frozenset({"false", "0", "no", "off", "none"})


def observations(
    controls: Sequence[Control],
    effective: Mapping[str, str],
    units: Sequence[Unit],
    *,
    engine: str | None = None,
    device: str | None = None,
    precision: str | None = None,
    allow_cpu_ops: Collection[str] = (),
    keys: Mapping[str, KeySeen] | None = None,
) -> tuple[Observation, ...]:
    """Compare every policy key with the records of a run.

    Engine, device and precision are compared even where the policy does not state them: what the plan resolved must be
    what ran.

    Parameters
    ----------
    controls : sequence of Control
        From the plan, one for each key that the policy states.
    effective : mapping of str to str
        Policy key to the value read back from the engine.
    units : sequence of Unit
        What ran.
    engine, device, precision : str, optional
        What the plan resolved, such as ``"onnxruntime"``, ``"cuda:0"`` and ``"fp16"``. Those left out are compared only
        where a control states them.
    allow_cpu_ops : collection of str
        Operators that the policy lets run on the CPU.
    keys : mapping of str to KeySeen, optional
        Keys that the engine itself has compared.

    Returns
    -------
    tuple of Observation
        Engine, device and precision first, then the order of `controls`.
    """
    taken = (c.resolved for c in controls if c.key == "execution.fallback" and c.resolved.startswith("used: "))
    fallback = next((text.removeprefix("used: ") for text in taken), None)
    comparison = _Comparison(
        effective, units, engine, device, precision, frozenset(allow_cpu_ops), keys or {}, fallback
    )
    stated = {c.key: c for c in controls}
    implied = [
        Control(key=key, requested=default, resolved=value, enforceability="enforced", reason="")
        for key, value, default in (
            ("execution.engine", engine, "auto"),
            ("execution.device", device, "auto"),
            ("execution.precision", precision, "model"),
        )
        if value is not None and key not in stated
    ]
    head = ("execution.engine", "execution.device", "execution.precision")
    both = [*implied, *controls]
    ordered = sorted(both, key=lambda c: head.index(c.key) if c.key in head else len(head))
    return tuple(comparison.observe(control) for control in ordered)


def computing(units: Iterable[Unit]) -> list[Unit]:
    """Return the units that ran and compute something of the model: no inserted copies, casts or layout changes."""
    return [u for u in units if u.computes]


class _Comparison:
    def __init__(
        self,
        effective: Mapping[str, str],
        units: Sequence[Unit],
        engine: str | None,
        device: str | None,
        precision: str | None,
        allowed: frozenset[str],
        keys: Mapping[str, KeySeen],
        fallback: str | None,
    ) -> None:
        self.effective, self.units, self.keys = effective, units, keys
        self.engine, self.device, self.precision, self.allowed = engine, device, precision, allowed
        self.fallback = fallback
        self.ran = computing(units)
        self._special: dict[str, Callable[[Control], tuple[str, Status, str]]] = {
            "mode": self._mode,
            "execution.engine": self._engine,
            "execution.device": self._device,
            "execution.precision": self._precision,
            "execution.layout": self._layout,
            "execution.tf32": self._tf32,
            "execution.determinism": self._determinism,
            "execution.fallback": self._fallback,
            "execution.allow_cpu_ops": self._allowed_ops,
        }

    def observe(self, control: Control) -> Observation:
        if control.key in self.keys:
            seen = self.keys[control.key]
            observed, status, reason = seen.observed, seen.status, seen.reason
        elif control.key in self._special:
            observed, status, reason = self._special[control.key](control)
        elif control.key.startswith("calibration."):
            observed, status, reason = control.resolved, "honoured", "compared before the session was opened"
        elif control.key.startswith("kernels."):
            observed, status, reason = observe_kernels(control, self.effective, self.ran)
        elif control.key.startswith("execution.weights."):
            observed, status, reason = self._weights(control)
        else:
            observed, status, reason = self._read_back(control)
        # An engine that narrows what the model states says so; a unit of fused nodes shows only what it writes.
        narrowed = control.key == "execution.precision" and control.requested == "model"
        if control.enforceability == "unsupported" and (status != "honoured" or narrowed):
            status, reason = "unsupported", control.reason or reason
        return Observation(
            key=control.key,
            requested=control.requested,
            resolved=control.resolved,
            observed=observed,
            status=status,
            reason=reason,
        )

    def _mode(self, control: Control) -> tuple[str, Status, str]:
        return control.resolved, "honoured", "the plan was made under it"

    def _engine(self, control: Control) -> tuple[str, Status, str]:
        wanted = self.engine or control.resolved
        seen = Counter(u.engine for u in self.ran)
        if not seen and "execution.engine" in self.effective:
            seen = Counter([self.effective["execution.engine"]])
        if not seen:
            return "-", "unobservable", "no unit was observed"
        observed = ", ".join(name for name, _ in seen.most_common())
        if set(seen) != {wanted}:
            return observed, "substituted", f"{wanted} was resolved, {observed} ran"
        if self.fallback is not None and not {wanted, "auto"} & _words(control.requested):
            return observed, "fallback", f"every unit ran on {wanted}, by execution.fallback: {self.fallback}"
        return observed, "honoured", f"every unit ran on {wanted}"

    def _device(self, control: Control) -> tuple[str, Status, str]:
        wanted = self.device or control.resolved
        if not self.ran:
            value = self.effective.get("execution.device")
            if value is None:
                return "-", "unobservable", "no unit was observed"
            same = value == wanted
            return value, "honoured" if same else "substituted", "read back from the engine"
        count = Counter(u.device for u in self.ran)
        observed = ", ".join(f"{name} ({n} of {len(self.ran)} units)" for name, n in count.most_common())
        away = [u for u in self.ran if u.device != wanted]
        allowed = [u for u in away if self._is_allowed(u)]
        deviating = [u for u in away if not self._is_allowed(u)]
        if deviating:
            return observed, "substituted", f"not on {wanted}: {_named(deviating)}"
        if allowed:
            return observed, "honoured", f"on the CPU as allow_cpu_ops permits: {_named(allowed)}"
        if self.fallback is not None and not {wanted, wanted.partition(":")[0], "auto"} & _words(control.requested):
            return observed, "fallback", f"every unit ran on {wanted}, by execution.fallback: {self.fallback}"
        return observed, "honoured", f"every unit ran on {wanted}"

    def _is_allowed(self, unit: Unit) -> bool:
        """Whether the policy lets this unit run on the CPU; of a fused one its engine judges, which sees inside."""
        return unit.device == "cpu" and bool(self.allowed) and (unit.op in self.allowed or unit.status == "honoured")

    def _precision(self, control: Control) -> tuple[str, Status, str]:
        wanted = self.precision or control.resolved
        counted = [u for u in self.ran if u.precision_requested and u.precision_run]
        if not counted:
            value = self.effective.get("execution.precision")
            if value is None:
                return "-", "unobservable", "no unit says in which precision it ran"
            same = _equal(value, wanted)
            return value, "honoured" if same else "substituted", "read back from the engine"
        kinds = Counter(u.precision_run or "" for u in counted)
        observed = ", ".join(f"{name} ({n} of {len(counted)} units)" for name, n in kinds.most_common())
        asked_of = {u.id: _asked(wanted, u) for u in counted}
        deviating = [u for u in counted if not _ran_in(asked_of[u.id], u.precision_run or "")]
        casts = sum(1 for u in self.units if u.relation == "inserted" and u.op == "Cast" and u.time is not None)
        if deviating:
            requests = ", ".join(sorted({asked_of[u.id] for u in deviating}))
            added = f"; the engine inserted {casts} casts" if casts else ""
            return observed, "substituted", f"asked for {requests}, ran otherwise: {_named(deviating)}{added}"
        tf32 = self.effective.get("execution.tf32", "")
        if wanted == "tf32":
            allowed = f" ({tf32})" if tf32 else ""
            return observed, "unobservable", f"the tensors are fp32; whether kernels used TF32{allowed} cannot be seen"
        if wanted == "fp32" and tf32.rpartition("=")[2].lower() in _TRUE:
            return observed, "substituted", f"the tensors are fp32, but {tf32}: fp32 excludes TF32, and it is allowed"
        unknown = [u for u in self.ran if u.precision_requested and not u.precision_run]
        if unknown:
            return observed, "unobservable", f"these do not say in which precision they ran: {_named(unknown)}"
        if wanted == "model":
            return observed, "honoured", "every unit ran in what the model states"
        others = sum(requested != wanted for requested in asked_of.values())
        if others:
            summary = f"every unit of which {wanted} was asked ran in it; {others} others ran in the types of the graph"
            return observed, "honoured", summary
        return observed, "honoured", f"every unit ran in {wanted}"

    def _layout(self, control: Control) -> tuple[str, Status, str]:
        wanted = control.requested
        placed = [u for u in self.ran if u.layout]
        if not placed:
            return "-", "unobservable", "no unit says in which layout it ran"
        count = Counter(u.layout or "" for u in placed)
        observed = ", ".join(f"{name} ({n} of {len(placed)} units)" for name, n in count.most_common())
        deviating = [u for u in placed if u.layout != wanted]
        if wanted == "auto" or not deviating:
            reason = "the choice was left open" if wanted == "auto" else f"every unit ran in {wanted}"
            return observed, "honoured", reason
        return observed, "substituted", f"not in {wanted}: {_named(deviating)}"

    def _weights(self, control: Control) -> tuple[str, Status, str]:
        packed = [u for u in self.ran if u.op == "MatMulNBits"]
        if not packed:
            return "-", "unobservable", "no product of packed weights is among the units"
        count = Counter(u.precision_run or "unknown" for u in packed)
        observed = "MatMulNBits in " + ", ".join(f"{name} ({n} of {len(packed)} units)" for name, n in count.items())
        if not control.key.endswith(".compute"):
            return observed, "honoured", "the graph states it, and these products ran from packed weights"
        other = [u for u in packed if (u.precision_run == "int8") != (control.requested == "int8")]
        if other:
            return observed, "substituted", f"not in {control.requested}: {_named(other)}"
        if "unknown" in count:
            return observed, "unobservable", "some do not say in which precision they ran"
        return observed, "honoured", f"every product of packed weights computed in {control.requested}"

    def _tf32(self, control: Control) -> tuple[str, Status, str]:
        if "execution.tf32" in self.effective:
            return self._read_back(control)
        if self.device == "cpu" and control.requested.lower() in _FALSE:
            return "no TF32", "honoured", "a CPU has none"
        return "-", "unobservable", "the setting was given; whether kernels used TF32 inside cannot be seen"

    def _determinism(self, control: Control) -> tuple[str, Status, str]:
        seen, status, reason = self._read_back(control)
        if status == "honoured" and control.requested not in ("none", "run_to_run"):
            reason = f"the setting is for run_to_run; {control.requested} shows only in a test: `xrt determinism`"
            return seen, "unobservable", reason
        return seen, status, reason

    def _fallback(self, control: Control) -> tuple[str, Status, str]:
        engine = self._engine(
            Control(key="", requested=self.engine or "", resolved="", enforceability="enforced", reason="")
        )
        if self.engine is None or engine[1] == "unobservable":
            return "-", "unobservable", "no unit was observed"
        if engine[1] == "honoured" and control.resolved.startswith("used"):
            return (
                "used",
                "fallback",
                f"{self.engine} ran, as the policy permits; the plan says why",
            )
        if engine[1] == "honoured":
            return "not used", "honoured", f"{self.engine} ran, as resolved"
        return engine[0], "substituted", engine[2]

    def _allowed_ops(self, _: Control) -> tuple[str, Status, str]:
        if not self.ran:
            return "-", "unobservable", "no unit was observed"
        away = [u for u in self.ran if u.device == "cpu" and self.device != "cpu"]
        if not away:
            return "none on the CPU", "honoured", "no unit needed the permission"
        outside = [u for u in away if not self._is_allowed(u)]
        observed = ", ".join(sorted({u.op for u in away}))
        if outside:
            return observed, "substituted", f"on the CPU without permission: {_named(outside)}"
        return observed, "honoured", "only permitted operators ran on the CPU"

    def _read_back(self, control: Control) -> tuple[str, Status, str]:
        value = self.effective.get(control.key)
        if value is None:
            way = "set" if control.enforceability == "enforced" else "passed on as advice"
            if control.resolved in ("", "-"):
                way = "not passed on"
            return "-", "unobservable", f"{way}; the engine gives no way to read it back"
        if control.enforceability == "unsupported":  # what was resolved is then another value than the one asked for
            same = _equal(value.rpartition("=")[2], control.requested)
        else:
            same = _equal(value, control.resolved) or _equal(value, control.requested)
        if same:
            return value, "honoured", "read back from the engine"
        return value, "substituted", "the engine reads back another value"


def _asked(wanted: str, unit: Unit) -> str:
    """Return the precision asked of one unit: the policy's own where it names one and the unit computes floats."""
    stated = unit.precision_requested or ""
    if wanted == "model" or stated not in (*_FLOATS, "int8"):
        return stated
    return stated if wanted == "int8" else wanted


def _words(requested: str) -> set[str]:
    return set(re.split(r"[,\s\[\]]+", requested)) - {""}


def _ran_in(wanted: str, ran: str) -> bool:
    parts = set(ran.split("->"))
    return wanted in parts or (wanted == "int8" and "uint8" in parts) or (wanted == "tf32" and "fp32" in parts)


def _equal(a: str, b: str) -> bool:
    a, b = a.strip().lower(), b.strip().lower()
    if a == b or (a in _TRUE and b in _TRUE) or (a in _FALSE and b in _FALSE):
        return True
    try:
        return float(a) == float(b)
    except ValueError:
        return False


def _named(units: Sequence[Unit]) -> str:
    shown = ", ".join(f"'{u.source_nodes[0] if u.source_nodes else u.id}' ({u.op}, {_fact(u)})" for u in units[:4])
    return shown + (f" and {len(units) - 4} more" if len(units) > 4 else "")


def _fact(unit: Unit) -> str:
    return f"{unit.device}, {unit.precision_run}" if unit.precision_run else unit.device
