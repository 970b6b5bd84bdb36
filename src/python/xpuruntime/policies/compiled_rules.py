# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`CompiledRules`: the rule engine, which matches the rules of one `KernelPolicy` against the facts of calls.

The rules are indexed by a discrimination tree: one level for each fact, with a branch for each exact value that a rule
states, for each literal prefix of a glob, and one for rules that state a range or nothing. The index returns every rule
that may match and some that do not; `CompiledRule.certainty` alone decides.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import msgspec

from xpuruntime.policies.call_facts import SIZES, UNKNOWN, CallFacts, Glob, bounds_of, literal_of, literal_prefix

if TYPE_CHECKING:
    from xpuruntime.policies.kernel_rules import KernelRule, RuleMatch, RulePrecision

Certainty = Literal["yes", "no", "unknown"]

_ARCH = "sm[0-9]{2,3}"
_AT = {name: position for position, name in enumerate(CallFacts._fields)}
#: Levels of the tree, those that tell most rules apart first.
_LEVELS = tuple(
    _AT[name] for name in ("node", "module", "op", "dtype", "m", "n", "k", "head_dim", "kv", "device", "arch", "phase")
)
_RANGES = ("m", "n", "k", "head_dim", "kv")
#: Phase to those that are parts of it.
_PARTS = {"infer": ("infer", "prefill", "decode")}
_DEVICE = _AT["device"]
_NAMES = frozenset((_AT["node"], _AT["module"]))
#: A list of rules that is not divided further.
_LEAF = 8


class CompiledRule:
    """One rule, with its conditions compiled."""

    __slots__ = ("_conditions", "_ops", "index", "rule", "source", "use")

    def __init__(self, index: int, rule: KernelRule) -> None:
        self.index = index
        self.rule = rule
        self.source = f"kernels.rules[{index}]"
        self.use = _as_tuple(rule.use)
        self._conditions = conditions_of(rule.match)
        self._ops = rule.ops_of_kernels()

    def __repr__(self) -> str:
        return f"CompiledRule({self.source}: {self.rule!r})"

    def certainty(self, facts: CallFacts) -> Certainty:
        """Say whether the rule matches a call."""
        if self._ops is not None and isinstance(facts.op, str) and facts.op not in self._ops:
            return "no"
        return certainty_of(self._conditions, facts)

    def lacking_sizes(self) -> tuple[str, str]:
        """Return why no call can match, of whose operations none has the sizes that are stated, and the fix.

        Empty texts where one may.
        """
        match = self.rule.match
        sizes = [name for name in _RANGES if getattr(match, name) is not None]
        ops = (match.op,) if match.op else tuple(self._ops or SIZES)
        if not sizes or any(set(sizes) <= set(SIZES.get(op, ())) for op in ops):
            return "", ""
        known = SIZES.get(ops[0], ()) if len(ops) == 1 else ()
        missing = [name for name in sizes if name not in known]
        of_call = f"a call of {ops[0]} has {', '.join(known) or 'no sizes'}"
        why = of_call if len(ops) == 1 else "no operation has all of these"
        return f"it states {', '.join(missing)}, and {why}", f"leave {missing[0]} out"


#: Place of a fact, and the test of a value: ``None`` where the value does not tell.
Condition: TypeAlias = "tuple[int, Callable[[Any], bool | None]]"


def conditions_of(match: RuleMatch) -> tuple[Condition, ...]:
    """Return the keys that a rule states as tests of facts, the cheapest first."""
    conditions: list[Condition] = []
    if match.op is not None:
        conditions.append((_AT["op"], match.op.__eq__))
    for name, stated in (("dtype", match.dtype), ("phase", phases_of(match))):
        if stated is not None:
            conditions.append((_AT[name], frozenset(_as_tuple(stated)).__contains__))
    for name in _RANGES:
        if (stated := getattr(match, name)) is not None:
            first, last = bounds_of(stated)
            conditions.append((_AT[name], range(first, last + 1).__contains__))
    if match.device is not None and re.fullmatch(_ARCH, match.device):
        conditions.append((_AT["arch"], match.device.__eq__))
    elif match.device is not None:
        conditions.append((_AT["device"], _device_test(match.device)))
    for name in ("node", "module"):
        if (pattern := getattr(match, name)) is not None:
            literal = literal_of(pattern)
            conditions.append((_AT[name], Glob(pattern) if literal is None else literal.__eq__))
    return tuple(conditions)


def phases_of(match: RuleMatch) -> tuple[str, ...] | None:
    """Return the phases that a rule is for, with the parts of each; ``None``: any."""
    if match.phase is None:
        return None
    return tuple(dict.fromkeys(part for name in _as_tuple(match.phase) for part in _PARTS.get(name, (name,))))


def certainty_of(conditions: Iterable[Condition], facts: CallFacts) -> Certainty:
    """Say whether all conditions hold: the only place where rules are compared with facts."""
    certainty: Certainty = "yes"
    for index, test in conditions:
        fact = facts[index]
        if fact is UNKNOWN:
            certainty = "unknown"
        elif fact is None:
            return "no"
        elif (holds := test(fact)) is None:
            certainty = "unknown"
        elif not holds:
            return "no"
    return certainty


def _device_test(stated: str) -> Callable[[str], bool | None]:
    def test(device: str) -> bool | None:
        if stated in ("auto", device) or stated == device.partition(":")[0]:
            return True
        return None if stated.startswith("cuda:") and device == "cuda" else False

    return test


class Preference(NamedTuple):
    """Kernels in order of preference, and the policy key that asks for them."""

    use: tuple[str, ...]
    source: str


class MatchResult(msgspec.Struct, frozen=True):
    """What a policy asks for one call."""

    preferences: tuple[Preference, ...]

    @property
    def use(self) -> tuple[str, ...]:
        """Kernels in order of preference, by the first rule that may match; never empty."""
        return self.preferences[0].use

    @property
    def source(self) -> str:
        """The policy key that asks: ``"kernels.rules[3]"``, ``"kernels.matmul"`` or ``"default"``."""
        return self.preferences[0].source

    @property
    def certainty(self) -> Certainty:
        """Whether `source` decides: ``"no"`` where the policy asks for nothing."""
        if len(self.preferences) > 1:
            return "unknown"
        return "no" if self.source == "default" else "yes"


DEFAULT = Preference(("auto",), "default")


class CompiledRules:
    """The rules and the short forms of a `KernelPolicy`. Immutable; threads share one."""

    def __init__(self, rules: Sequence[KernelRule], preferences: Mapping[str, str | tuple[str, ...]]) -> None:
        self.rules = tuple(CompiledRule(index, rule) for index, rule in enumerate(rules))
        self.short_forms = {op: Preference(_as_tuple(use), f"kernels.{op}") for op, use in preferences.items()}
        self._index = _divide(self.rules, 0)

    def match(self, facts: CallFacts) -> MatchResult:
        """Return what the policy asks for a call."""
        forms: list[Preference] = []
        for rule in self.candidates(facts):
            if not rule.use:
                continue
            certainty = rule.certainty(facts)
            if certainty != "no":
                forms.append(Preference(rule.use, rule.source))
            if certainty == "yes":
                return MatchResult(tuple(forms))
        forms.append(self.short_forms.get(facts.op, DEFAULT) if isinstance(facts.op, str) else DEFAULT)
        return MatchResult(tuple(forms))

    def match_precision(self, facts: CallFacts) -> tuple[RulePrecision | None, str]:
        """Return the precision of the first rule that matches a call and states one, and its policy key."""
        for rule in self.candidates(facts):
            if rule.rule.precision is not None and rule.certainty(facts) == "yes":
                return rule.rule.precision, rule.source
        return None, "default"

    def matching(self, facts: CallFacts) -> list[CompiledRule]:
        """Return every rule that matches a call or may match it, in order."""
        return [rule for rule in self.candidates(facts) if rule.certainty(facts) != "no"]

    def candidates(self, facts: CallFacts) -> list[CompiledRule]:
        """Return every rule that may match a call, and some that do not, in order."""
        rules: dict[int, CompiledRule] = {}
        _collect(self._index, facts, rules)
        return [rules[index] for index in sorted(rules)]


class _Branch(msgspec.Struct, frozen=True):
    fact: int
    exact: dict[Any, _Tree]
    #: Length of a literal prefix to the prefixes of this length.
    prefixes: dict[int, dict[str, _Tree]]
    rest: _Tree


_Tree: TypeAlias = "_Branch | Sequence[CompiledRule]"


def _divide(rules: Sequence[CompiledRule], level: int) -> _Tree:
    if len(rules) <= _LEAF:
        return rules
    for index in range(level, len(_LEVELS)):
        fact = _LEVELS[index]
        exact: dict[Any, list[CompiledRule]] = {}
        prefixes: dict[int, dict[str, list[CompiledRule]]] = {}
        rest: list[CompiledRule] = []
        for rule in rules:
            values, prefix = _keys(rule.rule.match, fact)
            for value in values:
                exact.setdefault(value, []).append(rule)
            if prefix:
                prefixes.setdefault(len(prefix), {}).setdefault(prefix, []).append(rule)
            elif not values:
                rest.append(rule)
        if exact or prefixes:
            below = index + 1
            return _Branch(
                fact,
                {value: _divide(some, below) for value, some in exact.items()},
                {
                    size: {text: _divide(some, below) for text, some in prefix.items()}
                    for size, prefix in prefixes.items()
                },
                _divide(rest, below),
            )
    return rules


def _keys(match: RuleMatch, fact: int) -> tuple[tuple[Any, ...], str]:
    """Return the exact values of a fact that a rule states, or the literal prefix of its glob; neither: any value."""
    name = CallFacts._fields[fact]
    stated: Any = phases_of(match) if name == "phase" else getattr(match, "device" if name == "arch" else name)
    if name in ("device", "arch") and stated is not None and (name == "arch") != bool(re.fullmatch(_ARCH, stated)):
        return (), ""
    if stated is None or (name == "device" and stated == "auto"):
        return (), ""
    if fact in _NAMES:
        literal = literal_of(stated)
        if literal is not None:
            return (literal,), ""
        return (), literal_prefix(stated)
    if isinstance(stated, str) and name in _RANGES:
        return (), ""  # a range
    return (stated if isinstance(stated, tuple) else (stated,)), ""


def _collect(tree: _Tree, facts: CallFacts, matching: dict[int, CompiledRule]) -> None:
    while isinstance(tree, _Branch):
        fact = facts[tree.fact]
        if fact is UNKNOWN or (tree.fact == _DEVICE and fact == "cuda"):
            for below in tree.exact.values():
                _collect(below, facts, matching)
            for texts in tree.prefixes.values():
                for below in texts.values():
                    _collect(below, facts, matching)
        elif fact is not None:
            for key in (fact, str(fact).partition(":")[0]) if tree.fact == _DEVICE else (fact,):
                if (met := tree.exact.get(key)) is not None:
                    _collect(met, facts, matching)
            for size, texts in tree.prefixes.items():
                if (met := texts.get(fact[:size])) is not None:  # type: ignore[index]
                    _collect(met, facts, matching)
        tree = tree.rest
    for rule in tree:
        matching[rule.index] = rule


def _as_tuple(words: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (words,) if isinstance(words, str) else words or ()
