# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Advisories: kernels of vendors that are known to give wrong numbers, with the calls, versions and devices concerned.

The rows are data, and ``XPURUNTIME_ADVISORIES`` names a file with more of them. Where one holds, `auto` takes another
kernel, a kernel that is named is refused or passed over, and `xrt doctor` names the row.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from xpuruntime.errors import InputError

#: Names a YAML file with further advisories.
VARIABLE = "XPURUNTIME_ADVISORIES"


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
    """One known error; `packages` are distributions, each with the versions that have it.

    `fix` is for an error that no policy avoids, as of kernels that a program calls by itself.
    """

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
    id: str = ""
    date: str = ""
    op: str = "attention"
    packages: tuple[tuple[str, str], ...] = ()
    fix: str = ""

    def holds_on(self, platform: Platform) -> bool:
        """Say whether the versions and the device are concerned."""
        if platform.arch and self.archs and platform.arch not in self.archs:
            return False
        if all("cudnn" in kernel for kernel in self.kernels) and (not platform.cudnn or platform.arch == "cpu"):
            return False
        if not (_within(platform.cudnn, self.cudnn) and _within(platform.torch, self.torch)):
            return False
        return all(_installed(name, versions) for name, versions in self.packages)

    def concerns(self, kernel: str, call: AdvisedCall) -> bool:
        """Say whether a call by a kernel is, or may be, concerned, on a platform where the row holds."""
        if kernel not in self.kernels or (self.gradient and not call.gradient) or (call.causal and not self.causal):
            return False
        if (self.mask and call.mask != self.mask) or (self.queries and call.queries not in (self.queries, None)):
            return False
        return self.keys is None or call.keys is None or call.keys % self.keys[0] == self.keys[1]

    def __str__(self) -> str:
        dated = f"{self.reference}, {self.date}" if self.date else self.reference
        return f"{self.wrong} ({dated})"


def _within(version: tuple[int, ...], bounds: tuple[tuple[int, ...], tuple[int, ...] | None] | None) -> bool:
    if bounds is None:
        return True
    first, last = bounds
    return version[: len(first)] >= first and (last is None or version[: len(last)] <= last)


def _installed(name: str, versions: str) -> bool:
    from packaging.specifiers import SpecifierSet

    try:
        return SpecifierSet(versions).contains(metadata.version(name), prereleases=True)
    except metadata.PackageNotFoundError:
        return False


def advisories() -> tuple[Advisory, ...]:
    """Return all rows: those of this release, and those of the file that the variable names.

    Raises
    ------
    InputError
        The file cannot be read, or is no list of advisories.
    """
    path = os.environ.get(VARIABLE, "").strip()
    return ADVISORIES + (_of_file(path) if path else ())


@functools.lru_cache(maxsize=4)
def _of_file(path: str) -> tuple[Advisory, ...]:
    import msgspec
    import yaml

    try:
        document = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
        rows = msgspec.convert(document, dict[str, list[dict[str, Any]]])["advisories"]
        return tuple(_row(row) for row in rows)
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError, msgspec.ValidationError) as error:
        msg = f"{VARIABLE} names {path}, which cannot be used: {type(error).__name__}: {error}"
        fix = "write `advisories:` and below it a list of id, date, kernels, wrong, reference and what they hold for"
        raise InputError(msg, fix=fix) from None


def _row(stated: dict[str, Any]) -> Advisory:
    from packaging.specifiers import SpecifierSet

    row: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in stated.items()}
    unknown = [name for name in row if name not in _STATED]
    missing = [name for name in ("id", "kernels", "wrong", "reference") if not row.get(name)]
    if unknown or missing:
        raise ValueError(f"{row.get('id', 'an advisory')} has no {missing[0]}" if missing else f"unknown {unknown[0]}")
    packages = {name: str(SpecifierSet(versions)) for name, versions in row.pop("packages", {}).items()}
    row |= {"date": str(row.get("date", "")), "packages": tuple(packages.items())}
    return Advisory(**row)


#: What a row of a file may state; the version of PyTorch is among those of its packages.
_STATED = frozenset(Advisory._fields) - {"cudnn", "torch"}


def holding(platform: Platform, rows: Iterable[Advisory] | None = None) -> tuple[Advisory, ...]:
    """Return the rows whose versions and devices are those of a platform."""
    return tuple(row for row in (advisories() if rows is None else rows) if row.holds_on(platform))


#: Devices that CuTe kernels are compiled for.
_CUTE = ("sm90", "sm100", "sm103", "sm120", "sm121")
_UPGRADE_FA4 = 'pip install "xpuruntime[fa4]"'

#: Seen on an H200 with PyTorch 2.11 and cuDNN 9.19, beside what the trackers say.
ADVISORIES = (
    Advisory(
        kernels=("torch.cudnn", "cudnn.sdpa"),
        wrong=(
            "cuDNN's gradient for queries is NaN where the number of keys is 64 more than a multiple of 128 and all "
            "scores of a query are below about -89"
        ),
        reference="https://github.com/pytorch/pytorch/issues/196678",
        id="cudnn-gradient-of-queries",
        date="2026-09-11",
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
        id="cudnn-gradient-of-one-query",
        archs=("sm90",),
        cudnn=((9, 19), None),
        gradient=True,
        queries=1,
    ),
    Advisory(
        kernels=("torch.cudnn",),
        wrong="a query that a boolean mask hides all keys from gets what cuDNN computes without the mask, instead of 0",
        reference="https://github.com/pytorch/pytorch/issues/177842",
        id="torch-cudnn-hidden-query",
        torch=((2, 10), (2, 11)),
        mask="boolean",
    ),
    Advisory(
        kernels=("torch.cudnn",),
        wrong="cuDNN reads an added mask of another type than the queries as if it were of theirs",
        reference="https://github.com/pytorch/pytorch/pull/191612",
        id="torch-cudnn-type-of-mask",
        torch=((2, 10), (2, 13)),
        mask="other",
    ),
    Advisory(
        kernels=("torch.flex_flash",),
        wrong="a block mask whose mask_mod hides nothing is ignored, and all blocks are computed",
        reference="https://github.com/pytorch/pytorch/issues/188322",
        id="flex-flash-block-mask",
        date="2026-06-27",
        archs=_CUTE,
        packages=(("torch", "<2.14"), ("flash-attn-4", ">=4.0.0b3")),
        fix="name torch.flex_triton for flex_attention, or give the mask a mask_mod that hides the same elements",
    ),
    Advisory(
        kernels=("torch.flex_flash",),
        wrong="FlashAttention 4's forward of sparse blocks does not get the lengths, and its outputs are wrong",
        reference="https://github.com/Dao-AILab/flash-attention/pull/2563",
        id="flex-flash-sparse-blocks",
        date="2026-05-13",
        archs=("sm90",),
        packages=(("flash-attn-4", "==4.0.0b13"),),
        fix=_UPGRADE_FA4,
    ),
    Advisory(
        kernels=("fa4.attention",),
        wrong="FlashAttention 4's gradients of two or more sequences with a head_dim of 256 are wrong",
        reference="https://github.com/NVIDIA/TransformerEngine/issues/3216",
        id="fa4-gradient-of-wide-heads",
        date="2026-07-16",
        archs=("sm100",),
        gradient=True,
        packages=(("flash-attn-4", "==4.0.0b11"),),
        fix=_UPGRADE_FA4,
    ),
    Advisory(
        kernels=("fa4.attention",),
        wrong=(
            "FlashAttention 4's gradient reads what the kernel before it has not written yet, and those of queries and "
            "keys are wrong now and then"
        ),
        reference="https://github.com/Dao-AILab/flash-attention/pull/2481",
        id="fa4-gradient-race",
        date="2026-04-21",
        archs=_CUTE,
        gradient=True,
        packages=(("flash-attn-4", "<=4.0.0b9"),),
        fix=_UPGRADE_FA4,
    ),
    Advisory(
        kernels=("fa4.attention",),
        wrong="FlashAttention 4's elements are wrong by up to 3.9 on this device, with a norm that looks right",
        reference="https://github.com/Dao-AILab/flash-attention/pull/2553",
        id="fa4-forward-of-sm120",
        date="2026-05-11",
        archs=("sm120",),
        packages=(("flash-attn-4", "==4.0.0b12"),),
        fix=_UPGRADE_FA4,
    ),
    Advisory(
        kernels=("quack.rms_norm",),
        wrong="quack's cache on disk confuses kernels of two widths, and the second width gets the first's",
        reference="https://github.com/Dao-AILab/quack/issues/162",
        id="quack-norm-of-second-width",
        date="2026-06-26",
        op="rms_norm",
        archs=_CUTE,
        packages=(("quack-kernels", "==0.3.2"),),
        fix='pip install "xpuruntime[quack]", and delete the folder that QUACK_CACHE_DIR names',
    ),
    Advisory(
        kernels=("quack.gemm",),
        wrong="outputs of quack's grouped matrix multiplications stay unwritten when other work runs on the GPU",
        reference="https://github.com/marin-community/marin/pull/8959",
        id="quack-grouped-gemm-unwritten",
        date="2026-09-08",
        op="matmul",
        archs=("sm100", "sm103"),
        packages=(("quack-kernels", ">=0.6.1,<0.6.4"),),
        fix='pip install "quack-kernels>=0.6.4"',
    ),
    Advisory(
        kernels=("LigerFusedLinearCrossEntropyFunction",),
        wrong="Liger multiplies the gradients of all rows by that of the first where reduction is none",
        reference="https://github.com/linkedin/Liger-Kernel/pull/1298",
        id="liger-linear-cross-entropy-of-rows",
        date="2025-12-06",
        op="linear_cross_entropy",
        gradient=True,
        packages=(("liger-kernel", "<0.8.2"),),
        fix='pip install "liger-kernel>=0.8.2"',
    ),
    Advisory(
        kernels=("LigerCrossEntropyFunction",),
        wrong="Liger's cross entropy writes over its logits, which the gradient of the operation before may need",
        reference="https://github.com/linkedin/Liger-Kernel/issues/1251",
        id="liger-cross-entropy-in-place",
        date="2026-06-04",
        op="cross_entropy",
        gradient=True,
        packages=(("liger-kernel", "<=0.8.5"),),
        fix="state `kernels: {cross_entropy: liger.cross_entropy}` in the policy, which gives it a copy",
    ),
    Advisory(
        kernels=("LIGER_KERNEL_IMPL=cutedsl",),
        wrong="Liger's CuTe norms add Gemma's 1 to the weight in 16 bits, where 0.0039 + 1 is 1",
        reference="https://github.com/linkedin/Liger-Kernel/pull/1462",
        id="liger-cute-gemma-norm",
        date="2026-09-11",
        op="rms_norm",
        archs=_CUTE,
        packages=(("liger-kernel", ">=0.8.3,<0.8.5"),),
        fix='pip install "liger-kernel>=0.8.5"',
    ),
    Advisory(
        kernels=("chunk_gated_delta_rule",),
        wrong="flash-linear-attention's gradients for beta and the gate are wrong as Triton compiles them",
        reference="https://github.com/fla-org/flash-linear-attention/pull/826",
        id="fla-gradient-of-gated-delta-rule",
        date="2026-04-12",
        op="gated_delta_rule",
        archs=("sm90",),
        gradient=True,
        packages=(("fla-core", "<0.5"), ("triton", ">=3.4,<3.7.1")),
        fix='pip install "flash-linear-attention>=0.5", which refuses such calls',
    ),
    Advisory(
        kernels=("_C::fused_qk_norm_rope",),
        wrong="vLLM's fused norm and RoPE give garbage or NaN where RoPE turns a part of head_dim alone",
        reference="https://github.com/vllm-project/vllm/issues/51049",
        id="vllm-norm-and-partial-rope",
        date="2026-08-04",
        op="rope",
        archs=("sm90",),
        packages=(("vllm", "==0.28.0"),),
        fix="turn the fusion of norm and RoPE off among the passes of vLLM's compilation config",
    ),
    Advisory(
        kernels=("vllm's all-reduce, norm and quantization by FlashInfer",),
        wrong="hidden states are corrupt where the weight of the norm is fp32 and activations are not",
        reference="https://github.com/vllm-project/vllm/issues/48324",
        id="vllm-all-reduce-and-norm",
        date="2026-07-11",
        op="rms_norm",
        packages=(("vllm", "==0.23.0"), ("flashinfer-python", ">=0")),
        fix="turn the fusion of all-reduce and norm off among the passes of vLLM's compilation config",
    ),
)
