# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Files that keep what a vendor's library measured or compiled, between processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuruntime.engines.model.file import looks_like, parse
from xpuruntime.errors import EngineError, ModelError
from xpuruntime.files.paths import cache_folder, make_private, not_private, reason_of, with_home
from xpuruntime.files.reading import read_regular
from xpuruntime.files.writing import locked, replace_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["CacheFile", "cache_file"]

#: TensorRT's own are a few megabytes.
_MAX_BYTES = 1 << 31


class CacheFile:
    """One file, replaced as a whole: who reads it sees the old content or the new one, also when a writer is killed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> bytes | None:
        """Return its content, or ``None`` where there is no such file."""
        reason = not_private(self.path.parent) or not_private(self.path)
        if reason is not None:
            raise EngineError(f"the cache {self.path} is not used, since another user may have written it: {reason}")
        try:
            return read_regular(self.path, _MAX_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise EngineError(f"the cache {self.path} cannot be read: {reason_of(error)}") from error

    def update(self, change: Callable[[bytes | None], bytes | None]) -> bool:
        """Replace the content by what `change` makes of it, keeping other processes out meanwhile."""
        try:
            make_private(self.path.parent)
            with locked(self.path.with_name(self.path.name + ".lock")):
                before = self.read()
                self._refuse_another(before)
                after = change(before)
                if after is None or after == before:
                    return False
                replace_file(self.path, after)
        except OSError as error:
            raise EngineError(f"the cache {self.path} cannot be written: {reason_of(error)}") from error
        return True

    def _refuse_another(self, content: bytes | None) -> None:
        """Refuse to replace what is plainly no cache: a model, an archive, a picture. Raises EngineError."""
        if not content:
            return
        known = looks_like(content[:4096])
        what = known[0] if known is not None else "an ONNX model" if _is_onnx(content) else None
        if what is not None:
            raise EngineError(f"the cache {self.path} is not written: that file is {what}. Fix: name another file")


def _is_onnx(content: bytes) -> bool:
    try:
        return len(parse(content, "").graph.node) > 0
    except ModelError:
        return False


def cache_file(stated: str | None, kind: str, target: dict[str, str]) -> CacheFile | None:
    """Return the file that an option names, or ``None`` where it is off."""
    if stated in (None, "off"):
        return None
    if stated != "default":
        return CacheFile(with_home(str(stated), f"the {kind} cache"))
    chip = target["compute_capability"].replace(" ", "-")
    return CacheFile(cache_folder() / "tensorrt" / f"{target['flavour']}-{target['version']}-sm{chip}.{kind}")
