# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`ArtifactPolicy`: where compiled models are kept, and what happens to one that does not fit."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from xpuruntime.policies.file_path import FilePath
from xpuruntime.policies.kinds import Choice, Kind
from xpuruntime.policies.refusal import Refused, did_you_mean, quote
from xpuruntime.policies.value import PolicyValue

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ArtifactPolicy", "Stale"]

Stale = Literal["error", "rebuild"]

_WORDS = ("off", "default")


class Folder(FilePath):
    """``"off"``, ``"default"``, or the path of a folder: text with a ``/`` in it, so that no misspelt word is one."""

    def __init__(self, doc: str) -> None:
        super().__init__(
            doc,
            what="'off', 'default', or a folder such as './cache'",
            parse=_check_folder,
            pattern=_PATTERN,
            words=_WORDS,
        )

    def _check(self, value: Any) -> Any:
        return super()._check(os.fspath(value) if isinstance(value, os.PathLike) else value)

    def relocate(self, value: Any, move: Callable[[str], str]) -> Any:
        """Return the path as `move` changes it, with a ``/`` in it."""
        moved = super().relocate(value, move)
        return moved if moved in _WORDS or "/" in moved or "\\" in moved else f"./{moved}"


_PATTERN = r"^(off|default)$|[/\\]"


def _check_folder(text: str) -> str:
    if text not in _WORDS and "/" not in text and "\\" not in text:
        raise Refused(
            f"{quote(text)} is neither 'off', 'default' nor a path{did_you_mean(text, _WORDS, 'words')} "
            f"For a folder of that name write './{text[:40]}'."
        )
    return text


class ArtifactPolicy(PolicyValue, frozen=True, kw_only=True):
    """Where compiled models are kept, and what happens to one that does not fit.

    Attributes
    ----------
    cache : str
        ``"off"``: nothing is kept. ``"default"``: the cache folder of the user. Otherwise the path of a folder, which
        has a ``/`` in it; the constructor also takes a ``pathlib.Path``. In a policy file it is relative to the folder
        of that file; in a value that was made otherwise, to the current folder.
    stale : {"error", "rebuild"}
        What happens when a compiled model is there that was made for another model, version, policy or device, or is
        damaged. ``error``: it is refused, with the reason. ``rebuild``: it is made again, and the report says so.

    Examples
    --------
    >>> ArtifactPolicy(cache="default", stale="rebuild")
    ArtifactPolicy(cache='default', stale='rebuild')
    """

    KINDS: ClassVar[dict[str, Kind]] = {
        "cache": Folder(
            "Where compiled models are kept: 'off', 'default', or a folder such as './cache', which is relative to the "
            "policy file."
        ),
        "stale": Choice(("error", "rebuild"), "What happens to a compiled model that does not fit."),
    }

    cache: str = "off"
    stale: Stale = "error"

    if TYPE_CHECKING:

        def __init__(self, *, cache: str | os.PathLike[str] = "off", stale: Stale = "error") -> None: ...
