# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The options that every session takes: the same for all commands, wherever a command puts them."""

from __future__ import annotations

import inspect

import pytest
import typer

from xpuruntime.cli.commands import plan, run, tune
from xpuruntime.cli.options import JsonOption, ModelArgument, SessionOptions, with_session_options

#: All but `compile`, which takes no .pt2 file and so no --trust.
COMMANDS = [run.run, run.bench, run.profile, plan.plan, plan.explain]


@with_session_options
def _told(
    model: ModelArgument, *, session_options: SessionOptions, json: JsonOption = False
) -> tuple[str, SessionOptions, bool]:
    """Say what was given."""
    return model, session_options, json


def told(*arguments: str) -> tuple[str, SessionOptions, bool]:
    app = typer.Typer()
    app.command()(_told)
    return app(args=list(arguments), standalone_mode=False)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.__name__)
def test_every_command_that_opens_a_session_takes_them(command):
    shown = inspect.signature(command, eval_str=True).parameters
    first = inspect.signature(_told).parameters
    assert {name: (shown[name].annotation, shown[name].default) for name in SessionOptions._fields} == {
        name: (first[name].annotation, SessionOptions._field_defaults[name]) for name in SessionOptions._fields
    }


def test_compile_takes_all_but_trust():
    shown = inspect.signature(tune.compile_, eval_str=True).parameters
    first = inspect.signature(_told).parameters
    fields = [name for name in SessionOptions._fields if name != "trust"]
    assert {name: (shown[name].annotation, shown[name].default) for name in fields} == {
        name: (first[name].annotation, None) for name in fields
    }
    assert "trust" not in shown


def test_they_stand_where_the_command_puts_them():
    assert list(inspect.signature(_told).parameters) == ["model", *SessionOptions._fields, "json"]


def test_what_is_given_reaches_the_command():
    assert told("m.onnx") == ("m.onnx", SessionOptions(), False)
    session_options = SessionOptions(
        policy="p.yaml", device="cpu", engine="null,openvino", precision="fp32", calibration="in.npz"
    )
    given = ["-p", "p.yaml", "-d", "cpu", "-e", "null,openvino", "--precision", "fp32", "--calibration", "in.npz"]
    assert told("m.onnx", *given, "--json") == ("m.onnx", session_options, True)


def test_engines_with_commas_are_a_list():
    assert SessionOptions(engine="null,openvino").arguments()["engine"] == ["null", "openvino"]
    assert SessionOptions(engine="null").arguments() == {**SessionOptions._field_defaults, "engine": "null"}
