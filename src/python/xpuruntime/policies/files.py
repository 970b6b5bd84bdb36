# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Policy files: reading text within limits, and writing a file as a whole or not at all."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.errors import PolicyError
from xpuruntime.policies.document import MappingNode, Node, Refused, did_you_mean, quote

if TYPE_CHECKING:
    from pathlib import Path

MAX_BYTES = 2**20
_FORMATS = {".yaml": "yaml", ".yml": "yaml", ".json": "json"}


class Document(msgspec.Struct):
    """A tree, the name to use in messages, and the SHA-256 of the file where it was read from one."""

    root: Node
    name: str
    sha256: str | None = None

    def has(self, key: str) -> bool:
        """Say whether the document states `key` at the top."""
        return isinstance(self.root, MappingNode) and key in self.root.entries


def policy_error(refused: Refused, name: str, subject: str = "the policy") -> PolicyError:
    """Return the public error: ``file:line:column: message``. `whole` says what kind of document it is."""

    def line(part: Refused) -> str:
        node = part.node
        text = f"{name}:{node.line}:{node.column}" if node is not None and node.line else name
        return f"{text}: {part.message(subject=subject)}"

    return PolicyError(refused.lines(line))


def loads(text: str, format: str, name: str) -> Document:
    """Read text in a format: ``"yaml"`` or ``"json"``. Raises `PolicyError`."""
    try:
        if not isinstance(text, str):
            raise Refused(f"got a {type(text).__name__}. Fix: give text")
        if len(text) > MAX_BYTES:
            raise Refused(f"larger than {MAX_BYTES} bytes, which no policy is. Fix: correct the path")
        if _format(format) == "json":
            from xpuruntime.policies.text_formats import read_json

            return Document(read_json(text), name)
        from xpuruntime.policies.text_formats import read_yaml

        return Document(read_yaml(text), name)
    except Refused as refused:
        raise policy_error(refused, name) from None


def dumps(document: dict[str, Any], format: str) -> str:
    """Write a document as text in a format. Raises `PolicyError` for an unknown format."""
    try:
        if _format(format) == "json":
            from xpuruntime.policies.text_formats import write_json

            return write_json(document)
        from xpuruntime.policies.text_formats import write_yaml

        return write_yaml(document)
    except Refused as refused:
        raise PolicyError(refused.message()) from None


def load(path: str | os.PathLike[str]) -> Document:
    """Read a file. Raises `PolicyError` when it is missing, too large, not text, or not YAML or JSON."""
    import hashlib
    from pathlib import Path

    from xpuruntime.files.paths import reason_of
    from xpuruntime.files.reading import read_regular

    name = os.fspath(path)
    if os.path.isdir(name):  # noqa: PTH112 - of a name that may be no path
        raise PolicyError(f"{name}: is a folder, not a policy file", fix="name a .yaml or .json file")
    format = _format_of(name)
    try:
        data = read_regular(name, MAX_BYTES)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise PolicyError(
                f"{name}: larger than {MAX_BYTES} bytes, as no policy is. Fix: correct the path"
            ) from None
        reason, near = reason_of(error), None
        if isinstance(error, FileNotFoundError):
            reason, near = _neighbour(Path(name))
        fix = f"name {near}" if near else "name a .yaml or .json file that exists"
        raise PolicyError(f"{name}: cannot be read: {reason}", fix=fix) from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise PolicyError(
            f"{name}:{line}: not UTF-8 text (byte 0x{data[error.start]:02x} at offset {error.start})",
            fix="save the file as UTF-8",
        ) from None
    document = loads(text, format, name)
    document.sha256 = hashlib.sha256(data).hexdigest()
    return document


def save(document: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a document to a file: all of it, or nothing and `PolicyError`.

    A new file gets the permissions the process gives to new files; a file that exists keeps its own. A symbolic link
    stays and the file it points to is replaced.
    """
    from xpuruntime.files.paths import reason_of
    from xpuruntime.files.writing import replace_file

    name = os.fspath(path)
    data = dumps(document, _format_of(name)).encode()
    try:
        replace_file(name, data, private=False)
    except IsADirectoryError:
        raise PolicyError(f"{name}: cannot be written: it is a directory", fix="name a file in it") from None
    except OSError as error:
        fix = "name a file in a folder that is there and writable"
        raise PolicyError(f"{name}: cannot be written: {reason_of(error)}", fix=fix) from None


def _format(format: str) -> str:
    if format not in ("yaml", "json"):
        raise Refused(f"{quote(str(format))} is not a format{did_you_mean(str(format), ('yaml', 'json'), 'formats')}")
    return format


def _format_of(name: str) -> str:
    from pathlib import Path

    suffix = Path(name).suffix
    if suffix not in _FORMATS:
        ends = f"ends in {quote(suffix)}" if suffix else "has no ending"
        msg = f"{name}: the name {ends}, so its format is not known"
        raise PolicyError(msg, fix=f"name a file that ends in {', '.join(_FORMATS)}")
    return _FORMATS[suffix]


def _neighbour(path: Path) -> tuple[str, str | None]:
    from xpuruntime.policies.document import nearest, question

    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.suffix in _FORMATS][:1000]
    except OSError:
        return f"no such file; the folder {str(path.parent)!r} does not exist or cannot be read", None
    near = nearest(path.name, names)
    meant = str(path.with_name(near)) if near else None
    return f"no such file{question(meant)}", meant
