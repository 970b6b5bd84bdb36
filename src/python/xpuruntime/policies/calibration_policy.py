# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`CalibrationPolicy`: which inputs a model is quantised with, and the digest that they must have."""

from __future__ import annotations

from typing import ClassVar

from xpuruntime.policies.file_path import FilePath
from xpuruntime.policies.kinds import Integer, Kind, Text
from xpuruntime.policies.refusal import Refused
from xpuruntime.policies.value import PolicyValue

__all__ = ["CalibrationPolicy"]

_COMMAND = "`xrt policy calibration MODEL PATH` prints both"
_MOST = 10**9


class CalibrationPolicy(PolicyValue, frozen=True, kw_only=True):
    """Which inputs a model is quantised with, and the digest that they must have.

    Attributes
    ----------
    path : str
        An ``.npz`` or ``.npy`` file, or a folder of them, as ``calibration=`` of a session takes it. In a policy file
        it is relative to the folder of that file; in a value that was made otherwise, to the current folder.
    digest : str
        ``"sha256:…"`` over names, types, shapes and values of all samples in their order, as
        ``xrt policy calibration`` prints it. Inputs with another digest are refused before anything is quantised.
    samples : int or None
        How many there are.
    """

    KINDS: ClassVar[dict[str, Kind]] = {
        "path": FilePath(
            "File or folder of the inputs, relative to the policy file.",
            what="the path of calibration inputs",
            optional=True,
        ),
        "digest": Text(
            "SHA-256 over all samples in their order, as `xrt policy calibration` prints it.",
            what="'sha256:' and 64 digits of 0-9 and a-f",
            parse=lambda text: _check_digest(text),
            pattern="^sha256:[0-9a-f]{64}$",
            optional=True,
        ),
        "samples": Integer(1, _MOST, "How many samples there are.", optional=True),
    }

    path: str | None = None
    digest: str | None = None
    samples: int | None = None

    def check_together(self) -> None:
        """Refuse inputs that are not named, or that nothing identifies."""
        for name in ("path", "digest"):
            if getattr(self, name) is None:
                raise Refused(f"states no {name!r}; {_COMMAND}")


def _check_digest(text: str) -> str:
    head, colon, digits = text.partition(":")
    if head != "sha256" or not colon or len(digits) != 64 or set(digits) - set("0123456789abcdef"):
        raise Refused(f"is no digest; expected 'sha256:' and 64 digits of 0-9 and a-f; {_COMMAND}")
    return text
