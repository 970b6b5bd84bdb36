# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`GenerationFolder`: a folder with a language model, its configuration checked before an engine reads it."""

from __future__ import annotations

from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.engines.model.external import ExternalFile
from xpuruntime.engines.model.file import refuse
from xpuruntime.files.paths import kind_of, reason_of
from xpuruntime.files.reading import decode_json, read_regular

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["INT32", "TOKENIZER", "ConfigFile", "GenerationFolder", "files_beside"]

INT32 = 2**31 - 1
#: Files beside a model that a tokenizer is read from.
TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip
_LARGEST_CONFIG = 16 << 20


class GenerationFolder(msgspec.Struct, frozen=True, kw_only=True):
    """What was read of a folder: sizes, tokens that end a text, and how the next token is chosen by default."""

    folder: str
    kind: str
    vocabulary: int
    context: int
    ends: tuple[int, ...]
    #: Whether the logits of all tokens of a prompt are given, and not of the last one only.
    every_logit: bool = True
    search: dict[str, Any]


class ConfigFile:
    """A JSON file of a folder whose values are checked one by one."""

    def __init__(self, folder: Path, name: str, again: str) -> None:
        self.folder, self.name, self._again = folder, name, again
        path = folder / name
        try:
            config = decode_json(read_regular(path, _LARGEST_CONFIG))
        except OSError as error:
            raise refuse(str(folder), f"{name} cannot be read ({reason_of(error)})", "restore the file") from None
        except msgspec.DecodeError as error:
            raise refuse(str(folder), f"{name} is no JSON: {error}", again) from None
        if not isinstance(config, dict):
            raise self.wrong(name, "an object", config)
        self.values: dict[str, Any] = config

    def refuse(self, reason: str, fix: str) -> Exception:
        """Return the error that names the folder."""
        return refuse(str(self.folder), reason, fix)

    def wrong(self, name: str, kind: str, value: Any) -> Exception:
        """Return the error about a value of another kind."""
        return self.refuse(f"{name} is {value!r:.60}, not {kind}", f"correct it in {self.name}, or {self._again}")

    def section(self, config: dict[str, Any], name: str) -> dict[str, Any]:
        """Return an object by the last part of its name."""
        value = config.get(name.rpartition(".")[2])
        if not isinstance(value, dict):
            raise self.wrong(name, "an object", value)
        return value

    def text(self, section: dict[str, Any], name: str) -> str:
        """Return text that is not empty."""
        value = section.get(name.rpartition(".")[2])
        if not isinstance(value, str) or not value:
            raise self.wrong(name, "text", value)
        return value

    def count(self, section: dict[str, Any], name: str) -> int:
        """Return a whole number above 0 that fits 32 bits."""
        value = section.get(name.rpartition(".")[2])
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= INT32:
            raise self.wrong(name, f"a whole number from 1 to {INT32}", value)
        return value

    def ends(self, section: dict[str, Any], name: str) -> tuple[int, ...]:
        """Return the tokens that end a text."""
        stated = section.get(name.rpartition(".")[2], [])
        ends = stated if isinstance(stated, list) else [] if stated is None else [stated]
        if not all(isinstance(end, int) and not isinstance(end, bool) and 0 <= end <= INT32 for end in ends):
            raise self.wrong(name, "a token id or a list of them", stated)
        return tuple(ends)

    def only(self, section: dict[str, Any], where: str, values: dict[str, Any]) -> None:
        """Refuse options of which only one value is run."""
        for name, value in values.items():
            stated = section.get(name, value)
            if stated is not None and stated != value:
                fix = f"set {where}{name} to {value} in {self.folder / self.name}"
                raise self.refuse(f"{where}{name} is {stated!r:.40}, and only {value} is run", fix)

    def file_name(self, name: str, key: str, what: str) -> str:
        """Return the name of a file that must be in the folder itself."""
        if name != PurePath(name).name or "\\" in name or "\0" in name or name in ("", ".."):
            reason = f"{key} is {name!r:.200}, and {what} must be a file in the folder itself"
            raise self.refuse(reason, f"move the file there and name it alone in {self.name}")
        return name


def files_beside(folder: Path, names: Iterable[str]) -> tuple[ExternalFile, ...]:
    """Return which of these files are there. A pipe, for which an engine would wait, is refused."""
    kinds = {name: kind_of(folder / name) for name in names}
    for name, kind in kinds.items():
        if kind not in ("file", "missing"):
            raise refuse(str(folder), f"{name} in it is a {kind}, not a file", "remove it, or put the file there")
    return tuple(
        ExternalFile(location=name, size=(folder / name).stat().st_size, tensors=0)
        for name, kind in kinds.items()
        if kind == "file"
    )
