# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A kernel package that tests install into a folder: two distributions, and an RMS norm that can be made wrong."""

from __future__ import annotations

import sys
from pathlib import Path

from xpuruntime.ops import plugins
from xpuruntime.ops.torch_kernels import forget_torch_kernels

PACKAGE = """
import torch

FACTOR = {factor}


def wide(x):
    return x if x.dtype == torch.float64 else x.float()


def forward(x, weight, eps):
    rstd = torch.rsqrt(wide(x).pow(2).mean(-1) + eps)
    normal = wide(x) * rstd[..., None]
    return (FACTOR * normal * weight).to(x.dtype), rstd


def backward(x, weight, rstd, grad):
    normal, scaled = wide(x) * rstd[..., None], FACTOR * wide(grad) * weight
    of_x = (scaled - normal * (normal * scaled).mean(-1, keepdim=True)) * rstd[..., None]
    return of_x.to(x.dtype), (FACTOR * wide(grad) * normal).flatten(0, -2).sum(0).to(weight.dtype)


@torch.library.custom_op("foreign_norms::rms_norm", mutates_args=())
def operator(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return forward(x, weight, epsilon)[0]


@operator.register_fake
def _(x, weight, epsilon):
    return torch.empty_like(x)


operator.register_autograd(
    lambda ctx, grad: (*backward(*ctx.saved_tensors, grad), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(
        *inputs[:2], torch.rsqrt(wide(inputs[0]).pow(2).mean(-1) + inputs[2])
    ),
)
"""


def install(
    folder: Path, version: str = "1.0", factor: float = 1.0, parts: tuple[str, ...] = ("norms", "core")
) -> Path:
    """Write the package ``foreign_norms`` and its distributions ``foreign-norms`` and ``foreign-core``."""
    (folder / "foreign_norms.py").write_text(PACKAGE.format(factor=factor))
    for old in folder.glob("foreign_*.dist-info"):
        for file in old.iterdir():
            file.unlink()
        old.rmdir()
    for part in parts:
        info = folder / f"foreign_{part}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: foreign-{part}\nVersion: {version}\n")
        (info / "RECORD").write_text(f"foreign_norms.py,sha256={version}{factor},1\n")
    return folder


class ForeignNorm(plugins.TorchKernel):
    """An adapter of that package, as a third party writes it."""

    id = "foreign.rms_norm"
    op = "rms_norm"
    description = "an RMS norm of another package"
    limits = "fp32 and bf16, with a weight"
    distributions = ("foreign-norms>=1,<3", "foreign-core>=1")
    install = "pip install foreign-norms"
    environment = ("FOREIGN_*",)
    deterministic = True

    def supports(self, call):
        if "weight" not in call.operands:
            return False, "it needs a weight"
        if call.attributes["formula"] != "torch":
            return False, "it computes the formula of F.rms_norm alone"
        return True, ""

    def forward(self, call, x, weight):
        import foreign_norms

        out, rstd = foreign_norms.forward(x, weight, call.attributes["epsilon"])
        return (out,), (rstd,)

    def backward(self, call, saved, grads):
        import foreign_norms

        x, weight = saved.inputs
        return foreign_norms.backward(x, weight, saved.extra[0], grads[0])


def forget() -> None:
    """Remove the kernel and the package from this process."""
    forget_torch_kernels("foreign")
    plugins._sources.pop("foreign", None)
    sys.modules.pop("foreign_norms", None)
