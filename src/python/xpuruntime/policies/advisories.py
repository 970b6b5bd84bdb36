# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Advisories: kernels of vendors that are known to give wrong numbers, with the calls, versions and devices concerned.

The rows are data. Where one holds, `auto` takes another kernel, a kernel that is named is refused or passed over, and
`xrt doctor` names the row.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["ADVISORIES", "AdvisedCall", "Advisory", "Platform", "holding"]


class Platform(NamedTuple):
    """Where a kernel would run."""

    torch: tuple[int, ...]
    cudnn: tuple[int, ...]
    arch: str


class AdvisedCall(NamedTuple):
    """What rows ask for of a call of attention."""

    gradient: bool
    mask: str
    causal: bool
    queries: int | None
    keys: int | None


class Advisory(NamedTuple):
    """One known error."""

    kernels: tuple[str, ...]
    wrong: str
    reference: str
    archs: tuple[str, ...] = ()
    cudnn: tuple[tuple[int, ...], tuple[int, ...] | None] | None = None
    torch: tuple[tuple[int, ...], tuple[int, ...] | None] | None = None
    gradient: bool = False
    mask: str = ""
    causal: bool = True
    queries: int = 0
    keys: tuple[int, int] | None = None

    def holds_on(self, platform: Platform) -> bool:
        """Say whether the versions and the device are concerned."""
        if platform.arch and self.archs and platform.arch not in self.archs:
            return False
        return _within(platform.cudnn, self.cudnn) and _within(platform.torch, self.torch)

    def concerns(self, kernel: str, call: AdvisedCall) -> bool:
        """Say whether a call by a kernel is, or may be, concerned, on a platform where the row holds."""
        if kernel not in self.kernels or (self.gradient and not call.gradient) or (call.causal and not self.causal):
            return False
        if (self.mask and call.mask != self.mask) or (self.queries and call.queries not in (self.queries, None)):
            return False
        return self.keys is None or call.keys is None or call.keys % self.keys[0] == self.keys[1]

    def __str__(self) -> str:
        return f"{self.wrong} ({self.reference})"


def _within(version: tuple[int, ...], bounds: tuple[tuple[int, ...], tuple[int, ...] | None] | None) -> bool:
    if bounds is None:
        return True
    first, last = bounds
    return version[: len(first)] >= first and (last is None or version[: len(last)] <= last)


def holding(platform: Platform) -> tuple[Advisory, ...]:
    """Return the rows whose versions and devices are those of a platform."""
    return tuple(row for row in ADVISORIES if row.holds_on(platform))


#: Seen on an H200 with PyTorch 2.11 and cuDNN 9.19, beside what the trackers say.
ADVISORIES = (
    Advisory(
        kernels=("torch.cudnn", "cudnn.sdpa"),
        wrong=(
            "cuDNN's gradient for queries is NaN where the number of keys is 64 more than a multiple of 128 and all "
            "scores of a query are below about -89"
        ),
        reference="https://github.com/pytorch/pytorch/issues/196678",
        archs=("sm90",),
        cudnn=((9, 19), (9, 25)),
        gradient=True,
        causal=False,
        keys=(128, 64),
    ),
    Advisory(
        kernels=("torch.cudnn", "cudnn.sdpa"),
        wrong="cuDNN's gradients for keys and values are NaN where there is one query and its scores are far below 0",
        reference="https://github.com/NVIDIA/cudnn-frontend/issues/1072",
        archs=("sm90",),
        cudnn=((9, 19), None),
        gradient=True,
        queries=1,
    ),
    Advisory(
        kernels=("torch.cudnn",),
        wrong="a query that a boolean mask hides all keys from gets what cuDNN computes without the mask, instead of 0",
        reference="https://github.com/pytorch/pytorch/issues/177842",
        torch=((2, 10), (2, 11)),
        mask="boolean",
    ),
    Advisory(
        kernels=("torch.cudnn",),
        wrong="cuDNN reads an added mask of another type than the queries as if it were of theirs",
        reference="https://github.com/pytorch/pytorch/pull/191612",
        torch=((2, 10), (2, 13)),
        mask="other",
    ),
)
