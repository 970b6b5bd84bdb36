# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`ExportResult`: the exported files, the outcome of each key of the policy, and the result of the proof."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.engines.native_export.native_config import KeyOutcome
from xpuruntime.files.paths import json_bytes
from xpuruntime.locks.verification.claims import VerificationResult

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["SCHEMA", "ExportResult"]

SCHEMA = "xpuruntime.export.result/1"


class ExportResult(msgspec.Struct, frozen=True, kw_only=True):
    """What `xpuruntime.export_lock` did.

    Attributes
    ----------
    schema : str
        ``"xpuruntime.export.result/1"``.
    target : str
        Such as ``"ort-python"``.
    folder : str
    lock, model : str
        Digest of the lock, and name of the model.
    engine, device : str
    files : dict of str to str
        Path in the folder to SHA-256.
    entry, command : str
        The file to begin with, and how it is run, from inside of the folder.
    keys : tuple of KeyOutcome
        What becomes of each key of the policy.
    notes : tuple of str
        What else differs from a session.
    proof : VerificationResult or None
        What a run without xpuruntime showed, where one was asked for.
    """

    schema: str = SCHEMA
    target: str
    folder: str
    lock: str
    model: str
    engine: str
    device: str
    files: dict[str, str] = {}
    entry: str
    command: str
    keys: tuple[KeyOutcome, ...] = ()
    notes: tuple[str, ...] = ()
    proof: VerificationResult | None = None

    @property
    def not_kept(self) -> tuple[KeyOutcome, ...]:
        """The keys that are weakened or lost."""
        return tuple(one for one in self.keys if one.outcome != "kept")

    @property
    def exit_code(self) -> int:
        """The exit code of ``xrt export``: that of the proof, as ``xrt verify`` has it; 0 without one."""
        return 0 if self.proof is None else self.proof.exit_code

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists and scalars, with `exit_code` in them."""
        found: dict[str, Any] = msgspec.json.decode(json_bytes(self))
        found["proof"] = None if self.proof is None else self.proof.to_dict()
        return {"schema": found.pop("schema"), "exit_code": self.exit_code, **found}

    def _repr_html_(self) -> str:
        from xpuruntime.notebook import rich_fragment

        return rich_fragment(self.__rich__())

    def __str__(self) -> str:
        from xpuruntime.evidence.render_text.tables import plain

        return plain(self.__rich__(), 100)

    def __rich__(self) -> RenderableType:
        from xpuruntime.locks.export.text import render

        return render(self)
