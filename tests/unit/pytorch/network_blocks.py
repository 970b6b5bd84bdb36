# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Blocks of networks for images and diffusion, each as it is written in the usual libraries, and a training of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BLOCKS", "trained"]


class _ResnetBlock(nn.Module):
    """Of a UNet: norms by groups, convolutions, the embedding of the time added in between."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, channels), nn.GroupNorm(4, channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.time = nn.Linear(channels, channels)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        hidden = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        tensor: torch.Tensor = x + self.conv2(F.silu(self.norm2(hidden)))
        return tensor


class _Attention(nn.Module):
    """Of a UNet: over positions, or over the words of a text, some of which a mask leaves out."""

    def __init__(self, channels: int, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.GroupNorm(4, channels)
        self.q, self.k, self.v = (nn.Linear(channels, channels, bias=False) for _ in range(3))
        self.out = nn.Linear(channels, channels)

    def forward(
        self, x: torch.Tensor, words: torch.Tensor | None = None, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        batch, channels, height, width = x.shape
        rows = self.norm(x).flatten(2).transpose(1, 2)
        given = rows if words is None else words
        q, k, v = (
            one.view(batch, -1, self.heads, channels // self.heads).transpose(1, 2)
            for one in (self.q(rows), self.k(given), self.v(given))
        )
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(batch, -1, channels)
        result: torch.Tensor = x + self.out(found).transpose(1, 2).reshape(batch, channels, height, width)
        return result


class _UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)
        self.down, self.up = nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.Conv2d(16, 8, 3, padding=1)
        self.block, self.middle = _ResnetBlock(8), _ResnetBlock(8)
        self.own, self.cross = _Attention(8), _Attention(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time = torch.linspace(0, 1, 8).expand(len(x), 8)
        words = torch.linspace(-1, 1, 5 * 8).view(1, 5, 8).expand(len(x), 5, 8)
        mask = torch.tensor([True, True, True, False, False]).view(1, 1, 1, 5)
        upper = self.block(self.first(x), time)
        lower = self.cross(self.own(self.middle(self.down(upper), time)), words, mask)
        lower = F.interpolate(lower, scale_factor=2.0, mode="nearest")
        result: torch.Tensor = self.last(F.silu(self.up(torch.cat([upper, lower], 1))))
        return result


class _Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.GroupNorm(4, 8), nn.SiLU())
        self.attention, self.moments = _Attention(8, heads=1), nn.Conv2d(8, 8, 1)
        self.decoder = nn.Sequential(
            nn.Conv2d(4, 8, 3, padding=1), nn.SiLU(), nn.Upsample(scale_factor=2), nn.Conv2d(8, 3, 3, padding=1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, log = self.moments(self.attention(self.encoder(x))).chunk(2, 1)
        result: torch.Tensor = self.decoder(mean + torch.exp(0.5 * log.clamp(-5, 5)))
        return result


class _ConvNeXt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.depthwise = nn.Conv2d(3, 8, 4, stride=4), nn.Conv2d(8, 8, 7, padding=3, groups=8)
        self.norm, self.scale = nn.LayerNorm(8, eps=1e-6), nn.Parameter(torch.full((8,), 0.1))
        self.wide, self.narrow = nn.Linear(8, 32), nn.Linear(32, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        hidden = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        x = x + (self.narrow(F.gelu(self.wide(hidden))) * self.scale).permute(0, 3, 1, 2)
        result: torch.Tensor = self.head(x.mean((2, 3)))
        return result


class _Swin(nn.Module):
    """Attention in windows of four by four that are shifted by two, with a bias by relative position."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.norm2 = nn.Conv2d(3, 8, 2, stride=2), nn.LayerNorm(8), nn.LayerNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.bias = nn.Parameter(torch.zeros(49, 2))
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        place = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")).flatten(1)
        apart = (place[:, :, None] - place[:, None, :]) + 3
        self.register_buffer("index", apart[0] * 7 + apart[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.stem(x).permute(0, 2, 3, 1)
        batch, height, width, channels = rows.shape
        moved = torch.roll(self.norm(rows), (-2, -2), (1, 2))
        windows = moved.view(batch, height // 4, 4, width // 4, 4, channels).permute(0, 1, 3, 2, 4, 5)
        windows = windows.reshape(-1, 16, channels)
        q, k, v = self.qkv(windows).view(-1, 16, 3, 2, channels // 2).permute(2, 0, 3, 1, 4)
        bias = self.bias[self.index.flatten()].view(16, 16, 2).permute(2, 0, 1)[None]
        found = self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2))
        found = found.view(batch, height // 4, width // 4, 4, 4, channels).permute(0, 1, 3, 2, 4, 5)
        rows = rows + torch.roll(found.reshape(batch, height, width, channels), (2, 2), (1, 2))
        result: torch.Tensor = rows + self.mlp(self.norm2(rows))
        return result


BLOCKS: dict[str, Callable[[], nn.Module]] = {"unet": _UNet, "vae": _Vae, "convnext": _ConvNeXt, "swin": _Swin}


def trained(name: str, prepare: Callable[[nn.Module], Callable[[torch.Tensor], Any]] = lambda net: net) -> list[float]:
    """Train a block for two steps, always from the same start, and return the losses.

    Parameters
    ----------
    name : str
        A key of `BLOCKS`.
    prepare : callable
        Takes the module and returns what is called instead.
    """
    torch.manual_seed(0)
    net = BLOCKS[name]()
    called = prepare(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.randn(2, 3, 16, 16)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = called(x.clone()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses
