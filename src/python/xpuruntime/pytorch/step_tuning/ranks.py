# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Ranks of a distributed step: the first decides how often each variant runs and which one wins, for all."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from xpuruntime.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from xpuruntime.measuring.rounds import Sampler

__all__ = ["Ranks"]


class Ranks:
    """The processes that do a step together; one process is a group of its own.

    A step has collectives, so that all ranks have to do the same number of steps in the same order.
    """

    def __init__(self) -> None:
        self.count = distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
        self.rank = distributed.get_rank() if self.count > 1 else 0

    def check_same(self, device: torch.device, names: Sequence[str]) -> None:
        """Refuse ranks that differ in device, library or variants. Raises InputError on all of them."""
        facts = {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
            "PyTorch": torch.__version__,
            "CUDA": str(torch.version.cuda),
            "variants": ", ".join(names),
        }
        for rank, other in enumerate(self.gather(facts)):
            for key, value in other.items():
                if value != facts[key]:
                    msg = (
                        f"rank {rank} has {key} {value!r}, and rank {self.rank} has {facts[key]!r}: what is measured "
                        "here holds for ranks of one kind. Fix: use the same devices and libraries on all ranks"
                    )
                    raise InputError(msg)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        if self.count == 1:
            return [value]
        found: list[Any] = [None] * self.count
        distributed.all_gather_object(found, value)
        return found

    def share(self, value: Any) -> Any:
        """Return the value of the first rank."""
        if self.count == 1:
            return value
        box = [value]
        distributed.broadcast_object_list(box, src=0)
        return box[0]

    def leading(self, variants: Mapping[str, Sampler]) -> dict[str, Sampler]:
        """Return variants for the first rank whose turns the others follow."""
        if self.count == 1:
            return dict(variants)

        def led(name: str, sampler: Sampler) -> Sampler:
            def turn(calls: int, samples: int) -> Sequence[float]:
                self.share((name, calls, samples))
                return sampler(calls, samples)

            return turn

        return {name: led(name, sampler) for name, sampler in variants.items()}

    def follow(self, variants: Mapping[str, Sampler]) -> None:
        """Do the turns that the first rank asks for, until it has measured enough."""
        while (turn := self.share(None)) is not None:
            name, calls, samples = turn
            variants[name](calls, samples)
