# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What a `CollectivePolicy` accepts, and what it makes of itself for NCCL."""

from __future__ import annotations

import ctypes
import os
import pickle
import threading
from dataclasses import dataclass

import pytest

from xpuruntime.distributed.environment import outer_environment, variables_set
from xpuruntime.distributed.nccl import NcclConfig
from xpuruntime.distributed.policy import CollectivePolicy
from xpuruntime.errors import EngineError, PolicyError, UnsupportedOperationError


@dataclass
class Library:
    """The facts of an NCCL that decide."""

    version: tuple[int, int, int] = (2, 28, 9)
    path: str = "libnccl.so.2"

    @property
    def version_code(self) -> int:
        major, minor, patch = self.version
        return major * 10000 + minor * 100 + patch

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
            "CollectivePolicy.min_channels: the number 0 is out of range; expected a whole number from 1 to 64",
        ),
        ({"max_channels": 65}, "out of range"),
        ({"min_channels": 9, "max_channels": 8}, "min_channels 9 is more than max_channels 8"),
        ({"algorithm": "nvls", "protocol": "ll"}, "algorithm 'nvls' has no protocol 'll'"),
        ({"algorithm": "pat", "protocol": "ll128"}, "algorithm 'pat' has no protocol 'll128'"),
        ({"cluster_size": 9}, "out of range"),
        ({"network": " "}, "is empty"),
        ({"blocking": 1}, "expected true or false"),
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
    assert config.net_name == b"Socket"
    assert config.blocking == 1
    assert config.magic == 0xCAFEBEEF
    plain = CollectivePolicy().config(Library(), {})
    assert plain.blocking == 0
    assert plain.net_name is None
    stated = {"size", "magic", "version", "blocking", "net_name", "comm_name"}
    assert {getattr(plain, name) for name, _ in NcclConfig._fields_ if name not in stated} == {UNSTATED}


def test_the_layout_is_that_of_nccl():
    """Offsets as a C compiler gives them to the structure in the headers of 2.18 to 2.28."""
    offsets = {name: getattr(NcclConfig, name).offset for name, _ in NcclConfig._fields_}
    assert offsets == {
        "size": 0, "magic": 8, "version": 12, "blocking": 16, "cga_cluster_size": 20, "min_ctas": 24, "max_ctas": 28,
        "net_name": 32, "split_share": 40, "traffic_class": 44, "comm_name": 48, "collnet_enable": 56,
        "cta_policy": 60, "shrink_share": 64, "nvls_ctas": 68,
    }  # fmt: skip
    assert ctypes.sizeof(NcclConfig) == 72
    assert NcclConfig.unstated(22809).version == 22700, "a newer library must not read fields behind the end"
    assert NcclConfig.unstated(22005).version == 22005


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
