# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`PolicySection`: a section of policy files that can be saved and loaded by itself."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, ClassVar

from xpuruntime.errors import PolicyError
from xpuruntime.policies import files
from xpuruntime.policies.file_path import seen_from
from xpuruntime.policies.value import PolicyValue

if TYPE_CHECKING:
    from typing import Self

__all__ = ["PolicySection"]


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
