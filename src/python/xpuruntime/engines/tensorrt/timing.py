# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The timing cache of TensorRT 10 and 11: tactics that were measured, kept for the next build."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xpuruntime.errors import EngineError

if TYPE_CHECKING:
    from xpuruntime.engines.tensorrt.caches import CacheFile

__all__ = ["TimingCache"]


class TimingCache:
    """A timing cache in use by one build."""

    def __init__(self, config: Any, cache: Any, file: CacheFile) -> None:
        self._config = config
        self._cache = cache  # has to live until the engine is built
        self._file = file

    @classmethod
    def attach(cls, config: Any, file: CacheFile | None, *, required: bool) -> TimingCache | None:
        """Give the content of `file` to the builder; ``None`` without a file."""
        if file is None:
            return None
        content = file.read()
        if content is None and required:
            msg = f"pin_tactics: require, but there is no timing cache {file.path}; build once with pin_tactics: record"
            raise EngineError(msg)
        cache = config.create_timing_cache(content or b"")
        if cache is None or not config.set_timing_cache(cache, False):
            msg = (
                f"the timing cache {file.path} was made on another GPU or by another version; delete it, or name "
                "another file"
            )
            raise EngineError(msg)
        return cls(config, cache, file)

    def keep(self) -> tuple[str, str]:
        """Write what is known now, together with what others wrote meanwhile; return what to tell."""
        cache = self._config.get_timing_cache()

        def merged(others: bytes | None) -> bytes:
            if others:
                other = self._config.create_timing_cache(others)
                if other is not None:
                    cache.combine(other, False)
            return bytes(cache.serialize())

        written = self._file.update(merged)
        return f"timing cache {self._file.path}", "written" if written else "nothing new was measured"
