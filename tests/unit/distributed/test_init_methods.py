# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What ``init_method=`` and the environment say, and what is refused."""

from __future__ import annotations

import pytest

from xpuruntime.distributed.init_methods import environment_number, local_rank, rendezvous
from xpuruntime.distributed.rendezvous.file import FileRendezvous
from xpuruntime.distributed.rendezvous.store import StoreRendezvous
from xpuruntime.distributed.rendezvous.tcp import TcpRendezvous
from xpuruntime.errors import InputError

ENV = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def test_each_kind():
    tcp = rendezvous("tcp://127.0.0.1:29400", 1)
    assert isinstance(tcp, TcpRendezvous)
    assert tcp._where == "127.0.0.1:29400"
    assert isinstance(rendezvous("file:///tmp/some%20where", 1), FileRendezvous)
    assert str(rendezvous("file:///tmp/some%20where", 1)._path) == "/tmp/some where"
    env = rendezvous("env://", 1, ENV)
    assert isinstance(env, TcpRendezvous)
    assert env._where == "10.0.0.1:29500"

    class Store:
        add = set = get = check = print

    assert isinstance(rendezvous(Store(), 1), StoreRendezvous)


@pytest.mark.parametrize(
    "method",
    ["", "tcp://127.0.0.1", "tcp://:29400", "tcp://host:0", "tcp://host:99999", "tcp://host:1/path", "tcp://host:x",
     "file://relative", "file:///", "file:///folder/", "http://host:1", "env://something", None, 3],
)  # fmt: skip
def test_what_is_refused(method: object):
    with pytest.raises(InputError, match=r"init_method is .*expected"):
        rendezvous(method, 1, ENV)


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({}, "no MASTER_ADDR. Fix: start the program with torchrun"),
        ({"MASTER_ADDR": "a"}, "no MASTER_PORT. Fix:"),
        (
            {"MASTER_ADDR": "a", "MASTER_PORT": "http"},
            "MASTER_PORT is 'http' in the environment; expected a whole number",
        ),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "70000"}, "MASTER_PORT is 70000"),
    ],
)
def test_variables_that_are_missing_or_wrong(env: dict[str, str], words: str):
    with pytest.raises(InputError, match=words):
        rendezvous("env://", 1, env)


def test_numbers_of_the_environment():
    assert environment_number("RANK", {"RANK": "12"}) == 12
    assert local_rank({"LOCAL_RANK": "3"}) == 3
    assert local_rank({}) is None
    for text in ("-1", "1.0", "", "²"):
        with pytest.raises(InputError, match="RANK is"):
            environment_number("RANK", {"RANK": text})
