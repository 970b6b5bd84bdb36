# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Exported`: the result of `export`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from xpuruntime.printable import printable

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Literal

    from xpuruntime.lockfile.export_lock import ExportLock
    from xpuruntime.policies import Policy

__all__ = ["OPSET", "Exported"]

#: The first opset in which attention is one operator.
OPSET = 23


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes
    ----------
    path : Path
    format : {"onnx", "pt2"}
    policy : Policy or None
        The policy that the file carries, as it was translated for inference.
    lock : ExportLock
    pinned : dict of str to tuple of str
        Node to the kernels that a rule of the policy asks for it; of ONNX files.
    notes : tuple of str
        What was changed or left out on the way, each with its reason.
    """

    path: Path
    format: Literal["onnx", "pt2"]
    policy: Policy | None
    lock: ExportLock
    pinned: dict[str, tuple[str, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return it as plain text."""
        lock = self.lock
        lines = [
            f"{self.path}: {lock.exporter}" + (f", opset {lock.opset}" if lock.opset else ""),
            f"  policy: {'none' if self.policy is None else json.dumps(self.policy.to_dict())}",
        ]
        lines += [f"  {node}: {', '.join(kernels)}" for node, kernels in self.pinned.items()]
        return printable("\n".join([*lines, *(f"  note: {note}" for note in self.notes)]))

    def _repr_html_(self) -> str:
        from xpuruntime.notebook import fragment, fragment_lines

        return fragment((fragment_lines(str(self).splitlines()),))
