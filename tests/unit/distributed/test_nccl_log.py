# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Lines of NCCL's log, as 2.23 to 2.30 write them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from xpuruntime.distributed.nccl_log import CollectiveChoice, read_choices
from xpuruntime.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

LOG = """\
host:41:41 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.4<0>
host:41:58 [0] NCCL INFO AllReduce: 4194304 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..15}
host:41:58 [0] NCCL INFO AllReduce: 64 Bytes -> Algo TREE proto LL channel{Lo..Hi}={0..0}
host:41:58 [0] NCCL INFO ReduceScatter: 1024 Bytes -> Algo COLLNET_DIRECT proto LL128 channel{Lo..Hi}={3..4}
host:41:58 [0] NCCL INFO Broadcast: 8 Bytes -> Algo RING proto LL time 6.600000
host:41:58 [0] NCCL INFO 64 Bytes -> something else
"""


def test_lines_are_read(tmp_path: Path):
    path = tmp_path / "nccl.log"
    path.write_text(LOG)
    assert read_choices(path) == [
        CollectiveChoice(collective="all_reduce", bytes=4194304, algorithm="ring", protocol="simple", channels=16),
        CollectiveChoice(collective="all_reduce", bytes=64, algorithm="tree", protocol="ll", channels=1),
        CollectiveChoice(
            collective="reduce_scatter", bytes=1024, algorithm="collnet_direct", protocol="ll128", channels=2
        ),
        CollectiveChoice(collective="broadcast", bytes=8, algorithm="ring", protocol="ll", channels=None),
    ]


def test_a_log_that_is_not_there(tmp_path: Path):
    with pytest.raises(InputError, match=r"cannot be read: No such file.*NCCL_DEBUG_FILE"):
        read_choices(tmp_path / "nccl.log")
