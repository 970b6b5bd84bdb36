# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The search space: points of it, made of what engines declare and of what the user states, in waves.

A wave has the points with so many settings away from the first value of their keys. Later waves combine settings that
stood alone. All of it is pure.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

from xpuruntime.engines.tunables import Tunable
from xpuruntime.errors import PolicyError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from xpuruntime.policies import Policy
    from xpuruntime.runtime.cpu_and_memory import CpuCores
    from xpuruntime.tuning.spec.parts import SearchSpace

__all__ = ["BATCH", "OPTIONS", "Point", "Setting", "Space", "apply_changes", "build_space", "kernel_values"]

_ENGINE, _DEVICE, _PRECISION, _THREADS = (f"execution.{key}" for key in ("engine", "device", "precision", "threads"))
_GRAPH = "execution.cuda_graph"
#: What the keys of options of engines begin with.
OPTIONS = "execution.provider_options."
#: The key of the rows of one run, which is none of a policy.
BATCH = "batch"
#: Values that are the same as leaving the key out.
_UNSTATED: dict[str, Any] = {_PRECISION: "model", _GRAPH: "off", "execution.layout": "auto"}


class Setting(NamedTuple):
    """One value of one key of one engine."""

    engine: str
    key: str
    value: Any


class Point(NamedTuple):
    """An engine, the settings away from the first value of their keys, and all keys that the point states."""

    engine: str
    settings: tuple[Setting, ...]
    changes: dict[str, Any]


class Space(NamedTuple):
    """Engines with their tunable settings, the device, and what was left out of the search and why."""

    device: str
    tunables: dict[str, tuple[Tunable, ...]]
    notes: tuple[str, ...]

    def wave(self, size: int, barred: frozenset[Setting] = frozenset()) -> Iterator[Point]:
        """Yield the points with `size` settings away from the first values, without those that are barred."""
        for engine, tunables in self.tunables.items():
            first = {one.key: one.values[0] for one in tunables}
            for keys in itertools.combinations(tunables, size):
                for values in itertools.product(*(one.values[1:] for one in keys)):
                    settings = tuple(Setting(engine, one.key, value) for one, value in zip(keys, values, strict=True))
                    stated = {**first, **{one.key: one.value for one in settings}}
                    if barred.isdisjoint(settings) and _needed(keys, stated):
                        yield Point(engine, settings, self._changes(engine, stated))

    def point(self, engine: str, settings: Sequence[Setting]) -> Point | None:
        """Return the point with these settings away from the first values; ``None`` where one would have no effect."""
        tunables = {one.key: one for one in self.tunables[engine]}
        stated = {**{key: one.values[0] for key, one in tunables.items()}, **{one.key: one.value for one in settings}}
        keys = [tunables[one.key] for one in settings]
        return Point(engine, tuple(settings), self._changes(engine, stated)) if _needed(keys, stated) else None

    def neighbours(self, point: Point) -> Iterator[Point]:
        """Yield the points that differ from one in the value of one key."""
        for tunable in self.tunables[point.engine]:
            others = tuple(one for one in point.settings if one.key != tunable.key)
            if len(others) < len(point.settings) and (found := self.point(point.engine, others)) is not None:
                yield found
            for value in tunable.values[1:]:
                setting = Setting(point.engine, tunable.key, value)
                if setting not in point.settings:
                    found = self.point(point.engine, (*others, setting))
                    if found is not None:
                        yield found

    def size(self) -> int:
        """Return the number of all points, without regard to what depends on what."""
        total = 0
        for tunables in self.tunables.values():
            product = 1
            for one in tunables:
                product *= len(one.values)
            total += product
        return total

    @property
    def waves(self) -> int:
        """The number of waves."""
        return 1 + max((len(tunables) for tunables in self.tunables.values()), default=0)

    def _changes(self, engine: str, stated: Mapping[str, Any]) -> dict[str, Any]:
        kept = {key: value for key, value in stated.items() if value is not None and _UNSTATED.get(key) != value}
        return {_ENGINE: engine, _DEVICE: self.device, **kept}


def build_space(
    base: Policy,
    wanted: SearchSpace,
    declared: Mapping[str, Sequence[Tunable]],
    *,
    device: str,
    cores: CpuCores,
    accuracy: bool,
    graphs: bool = True,
    batch: int = 1,
) -> Space:
    """Return the space."""
    stated, notes = base.stated(), []
    fixed = {key for key in stated if key not in (_ENGINE, _DEVICE)}
    replaced: dict[str, tuple[Any, ...]] = {}
    for name in ("precision", "cuda_graph", "layout", "threads"):
        key, values = f"execution.{name}", getattr(wanted, name)
        if values and key in fixed:
            msg = f"space.{name} searches {key}, which the base policy fixes; leave it out of one of them"
            raise PolicyError(msg)
        if values:
            replaced[key] = tuple(_threads(values, cores)) if name == "threads" else values
    if wanted.batch:
        replaced[BATCH] = (None, *(rows for rows in wanted.batch if rows != batch))
    for engine in wanted.options:
        if engine not in declared:
            msg = f"space.options.{engine}: this engine is not searched; the search has {', '.join(declared) or 'none'}"
            raise PolicyError(msg)
    if _PRECISION not in replaced and not accuracy and _PRECISION not in fixed:
        replaced[_PRECISION] = ("model",)
        notes.append(
            "the precision was not searched: state constraints.accuracy or space.precision to allow other precisions"
        )
    searched = {one.key for tunables in declared.values() for one in tunables}
    if not graphs and _GRAPH in searched and _GRAPH not in fixed:
        replaced[_GRAPH] = ("off",)
        notes.append(
            "CUDA graphs were not searched, because plain runs use none; objective.call: bind (--call bind) has bound "
            "runs timed"
        )
    found = {}
    for engine, tunables in declared.items():
        options = wanted.options.get(engine)
        mine = [*tunables, *(Tunable(key=key, values=()) for key in replaced)]
        if options is not None:
            mine = [one for one in mine if not one.key.startswith(OPTIONS)]
            mine += [
                Tunable(key=f"{OPTIONS}{engine}.{name}", values=(None, *values)) for name, values in options.items()
            ]
        found[engine] = tuple(_settled(mine, fixed, replaced))
    return Space(device, found, tuple(notes))


def _settled(
    tunables: Sequence[Tunable], fixed: set[str], replaced: Mapping[str, tuple[Any, ...]]
) -> Iterator[Tunable]:
    """Yield the settings that are free, each once, with the values that are asked for."""
    seen = set(fixed)
    for one in tunables:
        values = tuple(dict.fromkeys(replaced.get(one.key, one.values)))
        if one.key not in seen and values and not (len(values) == 1 and _UNSTATED.get(one.key) == values[0]):
            seen.add(one.key)
            yield Tunable(key=one.key, values=values, needs=one.needs, first=one.first)


def _threads(values: Sequence[Any], cores: CpuCores) -> Iterator[Any]:
    words = {"engine": None, "physical": cores.physical, "logical": cores.logical}
    return (words.get(value, value) for value in values)


def _needed(keys: Sequence[Tunable], stated: Mapping[str, Any]) -> bool:
    return all(stated.get(key) in values for one in keys for key, values in one.needs.items())


def kernel_values(wanted: SearchSpace, families: Mapping[str, Iterable[str]]) -> dict[str, tuple[str, ...]]:
    """Return the kernels to try by operation: those that are stated, or all families of each operation.

    All families come with ``auto_strategy``, by which an engine measures the kernels of each operation of a model.
    """
    if wanted.kernels == "off":
        return {}
    if wanted.kernels == "auto":
        named = {op: tuple(name for name in names if name != "auto") for op, names in families.items()}
        return {"auto_strategy": ("best_performance",), **named}
    return {op: tuple(values) for op in families if (values := getattr(wanted.kernels, op)) is not None}


def apply_changes(base: Policy, changes: Mapping[str, Any]) -> Policy:
    """Return a policy with keys changed: those of ``execution``, ``execution.provider_options`` and ``kernels``.

    The batch is of the runs, and changes no policy.
    """
    execution: dict[str, Any] = {}
    options = {engine: dict(given) for engine, given in base.execution.provider_options.items()}
    kernels: dict[str, Any] = {}
    for key, value in changes.items():
        if key == BATCH:
            continue
        section, _, name = key.partition(".")
        if key.startswith(OPTIONS):
            engine, _, option = key.removeprefix(OPTIONS).partition(".")
            options.setdefault(engine, {})[option] = value
        elif section == "kernels":
            kernels[name] = value
        else:
            execution[name] = value
    changed = base.execution._replaced({**execution, "provider_options": options})
    return base._replaced({"execution": changed, "kernels": base.kernels._replaced(kernels)})
