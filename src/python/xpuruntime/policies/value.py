# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`PolicyValue`, what all policy classes have in common, and `PolicySection`, which can be the only one of a file."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, dataclass_transform, overload

import msgspec

from xpuruntime.errors import PolicyError
from xpuruntime.policies import files
from xpuruntime.policies.compound_kinds import ListOf, Nested
from xpuruntime.policies.document import (
    MappingNode,
    Node,
    Refusals,
    Refused,
    ScalarNode,
    SequenceNode,
    describe,
    did_you_mean,
    quote,
)
from xpuruntime.policies.kinds import Kind, seen_from

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Self


__all__ = [
    "Accepts",
    "PolicySection",
    "PolicyValue",
    "field",
    "home_in_file",
    "home_in_python",
    "read_fields",
]


Stored = TypeVar("Stored")
Accepted = TypeVar("Accepted")


if TYPE_CHECKING:

    class Accepts(Generic[Stored, Accepted]):
        """The type of a field whose constructor takes more than it stores, such as ``"8GiB"`` for bytes."""

        @overload
        def __get__(self, instance: None, owner: Any) -> Any: ...
        @overload
        def __get__(self, instance: object, owner: Any) -> Stored: ...
        def __get__(self, instance: object | None, owner: Any) -> Any: ...
        def __set__(self, instance: object, value: Accepted) -> None: ...

else:

    class Accepts:
        """The type of a field: for checkers both, otherwise what it stores."""

        def __class_getitem__(cls, types: tuple[Any, Any]) -> Any:
            return types[0]


class _Field(msgspec.Struct, frozen=True):
    kind: Kind
    default: Any


def field(kind: Kind, *, default: Any = msgspec.NODEFAULT) -> Any:
    """State a field of a policy: its kind says what is checked, read, written and documented.

    Without a default it is required; with ``None`` it may be left out.
    """
    if default is None:
        kind.optional = True
    return _Field(kind, default)


class _PolicyMeta(msgspec.StructMeta):
    """Takes `field` apart, and reports unknown and missing keyword arguments in the words of a policy."""

    if not TYPE_CHECKING:

        def __new__(mcls, name: str, bases: Any, namespace: dict[str, Any], **options: Any) -> Any:
            fields = {name: value for name, value in namespace.items() if isinstance(value, _Field)}
            namespace = {name: value for name, value in namespace.items() if name not in fields}
            defaults = {name: value.default for name, value in fields.items() if value.default is not msgspec.NODEFAULT}
            if fields:
                kinds = {name: value.kind for name, value in fields.items()}
                required = tuple(name for name in fields if name not in defaults)
                namespace |= {"KINDS": kinds, "DEFAULTS": defaults, "REQUIRED": required}
            return super().__new__(mcls, name, bases, namespace | defaults, **options)

        def __call__(cls, *args: Any, **fields: Any) -> Any:  # noqa: N805 - a metaclass
            refusals = Refusals()
            try:
                for name in fields:
                    if name not in cls.KINDS:
                        refusals.add(Refused(did_you_mean(name, cls.KINDS, "keys"), unknown_key=name))
                refusals.raise_any()
                cls.check_required(fields)
            except Refused as refused:
                raise PolicyError(_message(refused, cls)) from None
            return super().__call__(*args, **fields)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
class PolicyValue(msgspec.Struct, metaclass=_PolicyMeta, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A frozen, keyword-only, hashable value; its repr can be pasted back.

    Each `field` is stated once. Constructors check everything and store canonical forms: lists as tuples, sizes in
    bytes. They raise `PolicyError`.
    """

    KINDS: ClassVar[dict[str, Kind]] = {}
    DEFAULTS: ClassVar[dict[str, Any]] = {}
    REQUIRED: ClassVar[tuple[str, ...]] = ()
    #: Classes of whole files, which enter themselves: an unknown key is looked for in all parts of one.
    ROOTS: ClassVar[list[Any]] = []

    def __post_init__(self) -> None:
        refusals = Refusals()
        try:
            for name, kind in self.KINDS.items():
                value = getattr(self, name)
                try:
                    canonical = kind.check(value)
                except Refused as refused:
                    refusals.add(refused.under(name))
                    continue
                if canonical is not value:
                    msgspec.structs.force_setattr(self, name, canonical)
            refusals.raise_any()
            self._check_together()
        except Refused as refused:
            raise PolicyError(_message(refused, type(self))) from None

    def _check_together(self) -> None:
        """Check fields against each other. Raises `Refused`."""

    @classmethod
    def check_required(cls, fields: dict[str, Any]) -> None:
        """Raise `Refused` when a required field is missing."""
        for name in cls.REQUIRED:
            if fields.get(name) is None:
                raise Refused(f"needs '{name}'. Fix: state '{name}'")

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
            for part in refused.everything:
                part.node = part.node or _find(node, part.path)
            raise refused from None

    def stated_fields(self) -> dict[str, Any]:
        """Return the fields that are away from their defaults."""
        missing = msgspec.NODEFAULT
        return {n: value for n in self.KINDS if (value := getattr(self, n)) != self.DEFAULTS.get(n, missing)}

    def to_plain(self, hidden: frozenset[str] = frozenset()) -> dict[str, Any]:
        """Return what a file says of this value: plain lists, dicts and scalars, without what is at its default."""
        return {n: self.KINDS[n].plain(value) for n, value in self.stated_fields().items() if n not in hidden}

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed. Raises `PolicyError` for unknown fields and bad values."""
        return type(self)(**{**{name: getattr(self, name) for name in self.KINDS}, **changes})

    def relocated(self, move: Callable[[str], str]) -> Self:
        """Return it with every path, of this value and those in it, as `move` changes it."""
        changes = {}
        for name, kind in self.KINDS.items():
            value = getattr(self, name)
            if (moved := kind.relocate(value, move)) != value:
                changes[name] = moved
        return self.replace(**changes) if changes else self

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self.stated_fields().items())
        return f"{type(self).__name__}({fields})"


def _message(refused: Refused, cls: Any) -> str:
    """Return the sentence of a refusal in Python; an unknown key that another class has comes with how to write it."""
    for part in refused.everything:
        if part.unknown_key is not None:
            part.reason = home_in_python(part.unknown_key, cls) or part.reason
    return refused.lines(lambda part: part.message(cls.__name__))


def read_fields(node: Node, kinds: dict[str, Kind]) -> dict[str, Any]:
    """Read the entries of a mapping, each by its kind. Raises `Refused` of each entry, with the node concerned."""
    if not isinstance(node, MappingNode):
        hint = ""
        if isinstance(node, ScalarNode) and isinstance(node.value, str) and ":" in node.value:
            hint = "; a space must follow the colon of each key"
        raise Refused(f"got {describe(node)}{hint}. Fix: state a mapping such as {{{next(iter(kinds))}: ...}}").at(node)
    fields = {}
    refusals = Refusals()
    for key, (key_node, value_node) in node.entries.items():
        kind = kinds.get(key)
        if kind is None:
            refusals.add(Refused(did_you_mean(key, kinds, "keys"), unknown_key=key).at(key_node))
            continue
        try:
            fields[key] = kind.read(value_node)
        except Refused as refused:
            refusals.add(refused.at(value_node).under(key))
    refusals.raise_any()
    return fields


def _find(node: Node, path: tuple[str | int, ...]) -> Node:
    for step in path:
        if isinstance(node, MappingNode) and step in node.entries:
            node = node.entries[str(step)][1]
        elif isinstance(node, SequenceNode) and isinstance(step, int) and step < len(node.items):
            node = node.items[step]
    return node


def home_in_file(key: str, kinds: dict[str, Kind]) -> str | None:
    """Return the end of a message for an unknown key that a file with these keys has in another section."""
    homes = [name for name, section in _sections("", kinds) if key in section]
    if not homes:
        return None
    there = " or ".join(quote(home) if home else "the top level of the file" for home in homes)
    return f"; it belongs in {there}. Fix: move it there"


def home_in_python(key: str, cls: Any) -> str | None:
    """Return the end of a message for an unknown key that another class of the value that `cls` is of has."""
    homes = [home for root in cls.ROOTS if cls in _classes(root) for home in _calls(root).get(key, ())]
    return f". Fix: write {' or '.join(homes)}" if homes else None


def _sections(name: str, kinds: dict[str, Kind]) -> Iterator[tuple[str, dict[str, Kind]]]:
    """Yield every mapping that a file can hold, by its dotted name; the top is ``""``."""
    yield name, kinds
    for key, kind in kinds.items():
        suffix, inner = _inner(kind)
        if inner is not None:
            yield from _sections(f"{name}.{key}{suffix[0]}" if name else f"{key}{suffix[0]}", inner.kinds)


@functools.cache
def _calls(root: Any) -> dict[str, list[str]]:
    """Return the calls of Python that state each key: ``"Policy(execution=ExecutionPolicy(engine=...))"``."""
    calls: dict[str, list[str]] = {}

    def walk(cls: Any, before: str, after: str) -> None:
        before, after = f"{before}{cls.__name__}(", f"){after}"
        for key, kind in cls.KINDS.items():
            calls.setdefault(key, []).append(f"{before}{key}=...{after}")
            suffix, inner = _inner(kind)
            if inner is not None:
                walk(inner.cls, f"{before}{key}={suffix[1]}", f"{suffix[2]}{after}")

    walk(root, "", "")
    return calls


@functools.cache
def _classes(root: Any) -> frozenset[Any]:
    inner = [kind.cls for _, kind in map(_inner, root.KINDS.values()) if kind is not None]
    return frozenset((root,)).union(*map(_classes, inner))


def _inner(kind: Kind) -> tuple[tuple[str, str, str], Nested | None]:
    if isinstance(kind, Nested):
        return ("", "", ""), kind
    item = getattr(kind, "item", None)
    marks = ("[]", "[", "]") if isinstance(kind, ListOf) else (".NAME", "{NAME: ", "}")
    return marks, item if isinstance(item, Nested) else None


class PolicySection(PolicyValue, frozen=True, kw_only=True):
    """A policy value that is a section of policy files, and can be the only one of a file."""

    #: The class of policy files, `Policy`, which enters itself: it is made of sections.
    WHOLE: ClassVar[Any]
    #: The key of the section, and the field of `Policy`.
    SECTION: ClassVar[str]
    #: Fields that stand outside of the section in a file.
    OUTSIDE: ClassVar[frozenset[str]] = frozenset()

    def to_json(self) -> str:
        """Return the policy as the text of a JSON policy file with only this section."""
        return files.dumps(self._document(), "json")

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` returns. Raises `PolicyError`."""
        return cls._from_document(files.loads(text, "json", "policy"), "policy")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a policy file with only this section; ``.yaml``, ``.yml`` or ``.json`` by its name.

        Paths below the folder of the file are written relative to it. The file is replaced as a whole or not at all.
        Raises `PolicyError` when it cannot be written.
        """
        folder = os.path.dirname(os.fspath(path))  # noqa: PTH120 - of a name that may be no path
        files.save(self.relocated(seen_from(folder))._document(), path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a policy file that has no other section."""
        return cls._from_document(files.load(path), os.fspath(path))

    def _document(self) -> dict[str, Any]:
        document: dict[str, Any] = self.WHOLE(**{self.SECTION: self}).to_dict()
        del document["mode"]
        return document

    @classmethod
    def _from_document(cls, document: files.Document, name: str) -> Self:
        policy = cls.WHOLE.from_document(document)
        own = {"schema", cls.SECTION, *cls.OUTSIDE}
        others = [key for key in cls.WHOLE.DOCUMENT if key not in own and document.has(key)]
        if others:
            raise PolicyError(
                f"{name}: states {' and '.join(others)}, which {_article(cls.__name__)} cannot hold; "
                f"read it with Policy.load and take its .{cls.SECTION}"
            )
        section: Self = getattr(policy, cls.SECTION)
        return section


def _article(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"
