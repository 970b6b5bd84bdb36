# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What a `CollectivePolicy` accepts, what it makes of itself for NCCL, and what NCCL's log says it ran."""

from __future__ import annotations

import os
import pickle
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from xpuruntime.distributed import CollectiveChoice, CollectivePolicy, read_choices
from xpuruntime.distributed.policy import outer_environment, variables_set
from xpuruntime.errors import EngineError, InputError, PolicyError, UnsupportedOperationError

if TYPE_CHECKING:
    from pathlib import Path


@dataclass
class Library:
    """The facts of an NCCL that decide."""

    version: tuple[int, int, int] = (2, 28, 9)
    path: str = "libnccl.so.2"

    @property
    def bindings(self) -> Any:
        return pytest.importorskip("nccl.bindings.nccl", reason="needs nccl4py", exc_type=ImportError)

    def has(self, *version: int) -> bool:
        return self.version >= version


UNSTATED = -(2**31)


def test_it_is_a_value():
    policy = CollectivePolicy(algorithm="ring", protocol="ll128", min_channels=2, max_channels=8)
    assert policy == CollectivePolicy(algorithm="ring", protocol="ll128", min_channels=2, max_channels=8)
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert eval(repr(policy)) == policy
    assert len({policy, policy.replace(max_channels=4)}) == 2


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"algorithm": "rng"}, "'rng' is not a valid value.*ring"),
        ({"protocol": "LL"}, "'LL' is not a valid value"),
        (
            {"min_channels": 0},
            "CollectivePolicy.min_channels: the number 0 is out of range. Fix: state a whole number from 1 to 64",
        ),
        ({"max_channels": 65}, "out of range"),
        ({"min_channels": 9, "max_channels": 8}, "min_channels 9 is more than max_channels 8"),
        ({"algorithm": "nvls", "protocol": "ll"}, "algorithm 'nvls' has no protocol 'll'"),
        ({"algorithm": "pat", "protocol": "ll128"}, "algorithm 'pat' has no protocol 'll128'"),
        ({"cluster_size": 9}, "out of range"),
        ({"network": " "}, "is empty"),
        ({"blocking": 1}, "Fix: state true or false"),
        ({"channels": 4}, "unknown key 'channels' in CollectivePolicy"),
    ],
)
def test_what_is_refused(fields: dict[str, object], words: str):
    with pytest.raises(PolicyError, match=words):
        CollectivePolicy(**fields)


def test_what_nccl_is_given():
    config = CollectivePolicy(
        min_channels=2, max_channels=8, nvls_channels=4, cluster_size=0, network="Socket", blocking=True
    ).config(Library(), {})
    assert (config.min_ctas, config.max_ctas, config.nvls_ctas, config.cga_cluster_size) == (2, 8, 4, 0)
    assert config.net_name == "Socket"
    assert config.blocking == 1
    plain = CollectivePolicy().config(Library(), {})
    assert plain.blocking == 0
    assert {plain.min_ctas, plain.max_ctas, plain.nvls_ctas, plain.cga_cluster_size} == {UNSTATED}


def test_variables_are_for_the_collectives_that_have_the_algorithm():
    assert CollectivePolicy().variables(Library(), {}) == {}
    assert CollectivePolicy(algorithm="tree", protocol="ll128").variables(Library(), {}) == {
        "NCCL_ALGO": "allreduce:tree",
        "NCCL_PROTO": "LL128",
    }
    assert CollectivePolicy(algorithm="pat").variables(Library(), {}) == {
        "NCCL_ALGO": "allgather:pat;reducescatter:pat"
    }


@pytest.mark.parametrize(
    ("policy", "version", "env", "words"),
    [
        (CollectivePolicy(algorithm="tree"), (2, 21, 5), {}, r"'tree' needs NCCL 2\.24\.0, and .* is 2\.21\.5"),
        (CollectivePolicy(nvls_channels=2), (2, 26, 2), {}, r"nvls_channels=2 needs NCCL 2\.27\.0"),
        (CollectivePolicy(algorithm="tree"), (2, 28, 9), {"NCCL_ALGO": "Ring"}, r"says NCCL_ALGO=Ring\. Fix: unset"),
        (CollectivePolicy(protocol="ll"), (2, 28, 9), {"NCCL_PROTO": "Simple"}, "environment says NCCL_PROTO=Simple"),
        (CollectivePolicy(max_channels=4), (2, 28, 9), {"NCCL_MAX_CTAS": "8"}, "NCCL_MAX_CTAS=4, .* NCCL_MAX_CTAS=8"),
        (CollectivePolicy(), (2, 28, 9), {"NCCL_COMM_BLOCKING": "1"}, r"blocking would be NCCL_COMM_BLOCKING=0"),
        (CollectivePolicy(algorithm="nvls"), (2, 28, 9), {"NCCL_NVLS_ENABLE": "0"}, "NVLS_ENABLE=0 switches it off"),
    ],
)  # fmt: skip
def test_what_this_nccl_or_its_environment_does_not_allow(policy, version, env, words):
    library = Library(version)
    with pytest.raises(UnsupportedOperationError, match=words) as caught:
        _ = policy.config(library, env), policy.variables(library, env)
    assert "Fix:" in str(caught.value)


def test_the_environment_may_say_the_same():
    policy = CollectivePolicy(protocol="ll", max_channels=4)
    assert policy.variables(Library(), {"NCCL_PROTO": "ll"}) == {"NCCL_PROTO": "LL"}
    assert policy.config(Library(), {"NCCL_MAX_CTAS": "4"}).max_ctas == 4


def test_variables_hold_in_a_block_and_come_back(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NCCL_PROTO", "ll")
    monkeypatch.delenv("NCCL_ALGO", raising=False)
    with variables_set({"NCCL_ALGO": "ring", "NCCL_PROTO": "LL"}, 1):
        assert (os.environ["NCCL_ALGO"], os.environ["NCCL_PROTO"]) == ("ring", "LL")
        assert outer_environment()["NCCL_PROTO"] == "ll"
        assert "NCCL_ALGO" not in outer_environment()
    assert "NCCL_ALGO" not in os.environ
    assert os.environ["NCCL_PROTO"] == "ll"


def test_the_same_variables_join_and_others_wait(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NCCL_ALGO", raising=False)
    joined, order = threading.Barrier(2, timeout=10), []

    def rank() -> None:
        with variables_set({"NCCL_ALGO": "ring"}, 10):
            joined.wait()  # both are inside, or this breaks

    threads = [threading.Thread(target=rank) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not joined.broken

    def other() -> None:
        with variables_set({}, 10):
            order.append(os.environ.get("NCCL_ALGO"))

    with variables_set({"NCCL_ALGO": "tree"}, 10):
        with (
            pytest.raises(EngineError, match="NCCL_ALGO=tree, and this one needs no algorithm"),
            variables_set({}, 0.05),
        ):
            pass
        waiting = threading.Thread(target=other)
        waiting.start()
        assert order == []
    waiting.join(10)
    assert order == [None], "it saw the variables of another"


#: As 2.23 to 2.30 write it.
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
