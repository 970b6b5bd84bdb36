# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Target`: the chip that a QNN graph is made for, by name or by numbers, and never left to the vendor's default.

Left out, ``soc_model`` and ``htp_arch`` come from whatever the process used before, so that the same model gives
different numbers. The names, numbers and sizes below are those that Qualcomm's own open-source backends use, in
ExecuTorch and LiteRT; ``SC8480XP`` is read from a context binary made for it.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

import msgspec

from xpuruntime.errors import PolicyError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["KEYS", "SOCS", "Target", "resolve_target", "state_one"]

_WHERE = "execution.provider_options.qnn"
#: Options of the policy that name the chip.
KEYS = ("soc", "soc_model", "htp_arch")
#: Architectures of the Hexagon Tensor Processor.
_ARCHITECTURES = (68, 69, 73, 75, 79, 81)


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """One chip."""

    name: str | None
    soc_model: int
    htp_arch: int
    vtcm_mb: int | None = None
    product: str = ""

    def __str__(self) -> str:
        """Return ``"SM8650 (soc_model 57, HTP v75)"``."""
        numbers = f"soc_model {self.soc_model}, HTP v{self.htp_arch}"
        return f"{self.name.upper()} ({numbers})" if self.name else numbers

    @property
    def has_float(self) -> bool:
        """Whether its tensor processor computes in floating point; v68 does not."""
        return self.htp_arch >= 69


def _soc(name: str, soc_model: int, htp_arch: int, vtcm_mb: int | None, product: str = "") -> tuple[str, Target]:
    return name, Target(name=name, soc_model=soc_model, htp_arch=htp_arch, vtcm_mb=vtcm_mb, product=product)


#: Chips that a policy may name.
SOCS: dict[str, Target] = dict(
    (
        _soc("sm8350", 30, 68, 4, "Snapdragon 888"),
        _soc("sm8450", 36, 69, 8, "Snapdragon 8 Gen 1"),
        _soc("sm8475", 42, 69, 8, "Snapdragon 8+ Gen 1"),
        _soc("sm8550", 43, 73, 8, "Snapdragon 8 Gen 2"),
        _soc("sm8650", 57, 75, 8, "Snapdragon 8 Gen 3"),
        _soc("sm8750", 69, 79, 8, "Snapdragon 8 Elite"),
        _soc("sm8850", 87, 81, 8, "Snapdragon 8 Elite Gen 5"),
        _soc("sc8380xp", 60, 73, 8, "Snapdragon X Elite"),
        _soc("sc8480xp", 88, 81, None, "Snapdragon X2 Elite"),
        _soc("sa8255", 52, 73, 8),
        _soc("sa8295", 39, 68, 8),
        _soc("qcs9100", 77, 73, 8),
        _soc("ssg2115p", 46, 73, 2),
        _soc("ssg2125p", 58, 73, 2),
        _soc("sxr1230p", 45, 73, 2),
        _soc("sxr2230p", 53, 69, 8),
        _soc("sxr2330p", 75, 79, 8),
        _soc("sar2230p", 95, 81, 4),
        _soc("sw6100", 96, 81, 4),
    )
)
_BY_MODEL = {target.soc_model: target for target in SOCS.values()}


def state_one() -> str:
    """Return the sentence that says how a policy names its chip."""
    return f"state {_WHERE}: {{soc: sm8650}}, or soc_model and htp_arch in numbers; known names: {', '.join(SOCS)}"


def resolve_target(given: Mapping[str, object]) -> Target | None:
    """Return the chip that a policy's options name, or ``None`` when they name none."""
    stated = {key: given[key] for key in KEYS if key in given}
    if not stated:
        return None
    if "soc" in stated:
        return _by_name(stated)
    if "soc_model" not in stated:
        msg = f"{_WHERE}.htp_arch: several chips have this architecture; {state_one()}"
        raise PolicyError(msg, engine="qnn")
    model = _number("soc_model", stated["soc_model"], 1, 9999)
    known = _BY_MODEL.get(model)
    if "htp_arch" not in stated:
        if known is None:
            msg = (
                f"{_WHERE}.soc_model: the architecture of chip {model} is not known here; state htp_arch beside it, "
                f"one of {', '.join(map(str, _ARCHITECTURES))}"
            )
            raise PolicyError(msg, engine="qnn")
        return known
    arch = _architecture(stated["htp_arch"])
    if known is not None and known.htp_arch != arch:
        msg = (
            f"{_WHERE}.htp_arch: {arch} contradicts soc_model {model}, which is {known}; correct one, or drop htp_arch"
        )
        raise PolicyError(msg, engine="qnn")
    return known or Target(name=None, soc_model=model, htp_arch=arch)


def _by_name(stated: Mapping[str, object]) -> Target:
    word = str(stated["soc"])
    target = SOCS.get(word.lower())
    if target is None:
        near = difflib.get_close_matches(word.lower(), SOCS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        msg = (
            f"{_WHERE}.soc: unknown chip {word!r}{hint} Known: {', '.join(SOCS)}. Any other chip can be given by "
            "soc_model and htp_arch"
        )
        raise PolicyError(msg, engine="qnn")
    for key, own in (("soc_model", target.soc_model), ("htp_arch", target.htp_arch)):
        if key in stated and str(stated[key]).lower().removeprefix("v") != str(own):
            msg = f"{_WHERE}.{key}: {stated[key]} contradicts soc {word}, which is {target}; drop one of them"
            raise PolicyError(msg, engine="qnn")
    return target


def _architecture(value: object) -> int:
    text = str(value).lower().removeprefix("v")
    if text not in map(str, _ARCHITECTURES):
        names = ", ".join(map(str, _ARCHITECTURES))
        msg = f"{_WHERE}.htp_arch: {str(value)!r} is none of the architectures {names}"
        raise PolicyError(msg, engine="qnn")
    return int(text)


def _number(key: str, value: object, low: int, high: int) -> int:
    try:
        number = int(str(value))
    except ValueError:
        number = -1
    if not low <= number <= high:
        msg = f"{_WHERE}.{key}: {str(value)!r} is no number from {low} to {high}"
        raise PolicyError(msg, engine="qnn")
    return number
