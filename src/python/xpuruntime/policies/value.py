# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`PolicyValue`: what all policy classes have in common."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from xpuruntime.errors import PolicyError
from xpuruntime.policies.document import MappingNode, Node, ScalarNode, SequenceNode, describe
from xpuruntime.policies.dropped_results import warn_if_dropped
from xpuruntime.policies.kinds import Kind
from xpuruntime.policies.refusal import Refused, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

__all__ = ["PolicyValue", "read_fields"]


class _PolicyMeta(msgspec.StructMeta):
    """Reports unknown and missing keyword arguments in the words of a policy."""

    if not TYPE_CHECKING:

        def __call__(cls, *args: Any, **fields: Any) -> Any:  # noqa: N805 - a metaclass
            try:
                for name in fields:
                    if name not in cls.KINDS:
                        raise Refused(did_you_mean(name, cls.KINDS, "keys"), unknown_key=name)
                cls.check_required(fields)
            except Refused as refused:
                raise PolicyError(_message(refused, cls)) from None
            return super().__call__(*args, **fields)


class PolicyValue(msgspec.Struct, metaclass=_PolicyMeta, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A frozen, keyword-only, hashable value; its repr can be pasted back.

    `KINDS` says what each field accepts. Constructors check everything and store canonical forms: lists as tuples,
    sizes in bytes. They raise `PolicyError`.
    """

    KINDS: ClassVar[dict[str, Kind]] = {}
    REQUIRED: ClassVar[tuple[str, ...]] = ()
    #: Classes of whole files, which enter themselves: an unknown key is looked for in all parts of one.
    ROOTS: ClassVar[list[Any]] = []

    def __post_init__(self) -> None:
        try:
            for name, kind in self.KINDS.items():
                value = getattr(self, name)
                try:
                    canonical = kind.check(value)
                except Refused as refused:
                    raise refused.under(name) from None
                if canonical is not value:
                    msgspec.structs.force_setattr(self, name, canonical)
            self.check_together()
        except Refused as refused:
            raise PolicyError(_message(refused, type(self))) from None

    def check_together(self) -> None:
        """Check fields against each other. Raises `Refused`."""

    @classmethod
    def check_required(cls, fields: dict[str, Any]) -> None:
        """Raise `Refused` when a required field is missing."""
        for name in cls.REQUIRED:
            if fields.get(name) is None:
                raise Refused(f"needs '{name}'")

    @classmethod
    def read(cls, node: Node, kinds: dict[str, Kind] | None = None) -> Self:
        """Read a mapping of a document; `kinds` are the keys it may have. Raises `Refused` with the node concerned."""
        fields = read_fields(node, cls.KINDS if kinds is None else kinds)
        try:
            return cls(**fields)
        except PolicyError as error:
            # Each field is good by itself, so fields do not go together; the constructor's reason is kept as context.
            refused = error.__context__
            assert isinstance(refused, Refused)
            raise refused.at(_find(node, refused.path)) from None

    def stated_fields(self) -> dict[str, Any]:
        """Return the fields that are away from their defaults."""
        defaults = _defaults(type(self))
        return {name: value for name in self.KINDS if (value := getattr(self, name)) != defaults[name]}

    def to_plain(self, hidden: frozenset[str] = frozenset()) -> dict[str, Any]:
        """Return what a file says of this value: plain lists, dicts and scalars, without what is at its default."""
        return {n: self.KINDS[n].plain(value) for n, value in self.stated_fields().items() if n not in hidden}

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed. Raises `PolicyError` for unknown fields and bad values.

        Warns where nothing is done with the copy, since this value stays as it is.
        """
        made = self._replaced(changes)
        warn_if_dropped(f"policy.replace({', '.join(f'{name}=...' for name in changes)})")
        return made

    def relocated(self, move: Callable[[str], str]) -> Self:
        """Return it with every path, of this value and those in it, as `move` changes it."""
        changes = {}
        for name, kind in self.KINDS.items():
            value = getattr(self, name)
            if (moved := kind.relocate(value, move)) != value:
                changes[name] = moved
        return self._replaced(changes) if changes else self

    def _replaced(self, changes: dict[str, Any]) -> Self:
        return type(self)(**{**{name: getattr(self, name) for name in self.KINDS}, **changes})

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self.stated_fields().items())
        return f"{type(self).__name__}({fields})"


def _message(refused: Refused, cls: Any) -> str:
    """Return the sentence of a refusal in Python; an unknown key that another class has comes with how to write it."""
    if refused.unknown_key is not None:
        from xpuruntime.policies.key_homes import home_in_python

        refused.reason = home_in_python(refused.unknown_key, cls) or refused.reason
    return refused.message(cls.__name__)


def read_fields(node: Node, kinds: dict[str, Kind]) -> dict[str, Any]:
    """Read the entries of a mapping, each by its kind. Raises `Refused` with the node concerned."""
    if not isinstance(node, MappingNode):
        hint = ""
        if isinstance(node, ScalarNode) and isinstance(node.value, str) and ":" in node.value:
            hint = "; a space must follow the colon of each key"
        raise Refused(f"expected a mapping such as {{{next(iter(kinds))}: ...}}, got {describe(node)}{hint}").at(node)
    fields = {}
    for key, (key_node, value_node) in node.entries.items():
        kind = kinds.get(key)
        if kind is None:
            raise Refused(did_you_mean(key, kinds, "keys"), unknown_key=key).at(key_node)
        try:
            fields[key] = kind.read(value_node)
        except Refused as refused:
            raise refused.at(value_node).under(key) from None
    return fields


def _find(node: Node, path: tuple[str | int, ...]) -> Node:
    for step in path:
        if isinstance(node, MappingNode) and step in node.entries:
            node = node.entries[str(step)][1]
        elif isinstance(node, SequenceNode) and isinstance(step, int) and step < len(node.items):
            node = node.items[step]
    return node


@functools.cache
def _defaults(cls: type[msgspec.Struct]) -> dict[str, Any]:
    return {
        field.name: field.default_factory() if callable(field.default_factory) else field.default
        for field in msgspec.structs.fields(cls)
    }
