# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Profile`: a recording with what engines reported, as a value that sums, prints and writes itself."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from xpuruntime.evidence.kernel_records import short_name
from xpuruntime.evidence.trace_files import chrome_trace, trace_path, write_trace
from xpuruntime.shown import Shown

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from rich.console import RenderableType

    from xpuruntime.runtime.profiler import DeviceRecording, DeviceWork, HostCall, Mark, Range, WorkSource

__all__ = ["Profile", "Share"]

#: Rows of each table that are printed.
_SHOWN = 20


class Share(NamedTuple):
    """What one kind of thing took.

    Attributes
    ----------
    what : {"range", "kernel", "copy", "fill", "wait", "allocation", "release"}
    name : str
        Of a copy, from where to where.
    times : int
    us : float
        Microseconds, all together: of ranges of the host, with what ran inside.
    bytes : int
    """

    what: Literal["range", "kernel", "copy", "fill", "wait", "allocation", "release"]
    name: str
    times: int
    us: float
    bytes: int


class Profile(Shown):
    """What ran in a block of `xpuruntime.profile`; see there.

    Parameters
    ----------
    recording : DeviceRecording
    marks : sequence of Mark
    """

    WIDTH = 120

    def __init__(self, recording: DeviceRecording, marks: tuple[Mark, ...] = ()) -> None:
        self._recording, self._marks = recording, marks

    @property
    def source(self) -> WorkSource:
        """Where device work comes from: ``"cupti"``, ``"kineto"``, ``"events"`` or ``"none"``."""
        return self._recording.source

    @property
    def notes(self) -> tuple[str, ...]:
        """What could not be recorded, and why."""
        return self._recording.notes

    @property
    def ranges(self) -> tuple[Range, ...]:
        """Pieces of the host's time, in the order in which they began."""
        return self._recording.ranges

    @property
    def work(self) -> tuple[DeviceWork, ...]:
        """What devices did, in the order in which it began."""
        return self._recording.work

    @property
    def calls(self) -> tuple[HostCall, ...]:
        """Calls of CUDA's that gave devices work, or waited for them."""
        return self._recording.calls

    @property
    def marks(self) -> tuple[Mark, ...]:
        """What engines and other parts of xpuruntime reported, such as the nodes of an explained pass."""
        return self._marks

    @property
    def dropped(self) -> int:
        """Records that came after the limit, and are lost."""
        return self._recording.dropped

    @property
    def duration_us(self) -> float:
        """Microseconds from the first to the last moment."""
        return (self._recording.end_ns - self._recording.start_ns) / 1000

    def shares(self) -> tuple[Share, ...]:
        """Return what each range, kernel, kind of copy and so on took, the longest first within a kind."""
        sums: dict[tuple[Any, str], list[tuple[float, int]]] = defaultdict(list)
        for range_ in self.ranges:
            sums["range", range_.name].append(((range_.end_ns - range_.start_ns) / 1000, 0))
        for work in self.work:
            name = f"{work.source or '?'} -> {work.destination or '?'}" if work.kind == "copy" else work.name
            sums[work.kind, name].append((work.us, work.bytes))
        order = ("range", "kernel", "copy", "fill", "wait", "allocation", "release")
        shares = [
            Share(what, name, len(held), sum(us for us, _ in held), sum(size for _, size in held))
            for (what, name), held in sums.items()
        ]
        return tuple(sorted(shares, key=lambda share: (order.index(share.what), -share.us, share.name)))

    def to_dict(self) -> dict[str, Any]:
        """Return the sums as plain values."""
        return {
            "schema": "xpuruntime.profile/1",
            "source": self.source,
            "notes": list(self.notes),
            "duration_us": self.duration_us,
            "dropped": self.dropped,
            "shares": [share._asdict() for share in self.shares()],
        }

    def save_trace(self, path: str | os.PathLike[str], metadata: dict[str, Any] | None = None) -> Path:
        """Write a trace for Perfetto and ``chrome://tracing``. A crash or a full disk leaves the old file, or none.

        Parameters
        ----------
        path : path
            Ends in ``.json``, or ``.json.gz`` for a compressed one.
        metadata : dict, optional
            Plain values to keep in it.

        Raises
        ------
        InputError
            The path ends otherwise, or the file cannot be written.
        """
        target = trace_path(path)
        write_trace(target, chrome_trace(self._recording, self._marks, metadata))
        return target

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        from xpuruntime.tables import table

        parts: list[RenderableType] = [
            Text(f"{self.duration_us / 1000:.2f} ms; device work: {_SOURCES[self.source]}"),
        ]
        shares = self.shares()
        device = sum(share.us for share in shares if share.what in ("kernel", "copy", "fill"))
        for title, kinds in (("host", ("range",)), ("devices", ("kernel", "copy", "fill", "wait", "allocation"))):
            rows = [share for share in shares if share.what in kinds]
            if not rows:
                continue
            shown = table(title, ("what", "name", ">times", ">us", ">share", ">bytes"))
            for row in rows[:_SHOWN]:
                counts = row.what in ("kernel", "copy", "fill") and device > 0
                share = f"{row.us / device:.0%}" if counts else ""
                size = f"{row.bytes:,}" if row.bytes else ""
                name = short_name(row.name) if row.what == "kernel" else row.name
                shown.add_row(row.what, Text(name), str(row.times), f"{row.us:.1f}", share, size)
            parts.append(shown)
            if len(rows) > _SHOWN:
                parts.append(Text(f"and {len(rows) - _SHOWN} more"))
        parts += [Text(f"note: {note}") for note in self.notes]
        return Group(*parts)

    def __repr__(self) -> str:
        counts = f"{len(self.ranges)} ranges, {len(self.work)} pieces of device work"
        return f"<Profile of {self.duration_us / 1000:.2f} ms: {counts}, source {self.source}>"


_SOURCES = {
    "none": "not recorded",
    "cupti": "by CUPTI",
    "kineto": "by PyTorch's profiler",
    "events": "by CUDA events, of kernels that xpuruntime dispatches",
}
