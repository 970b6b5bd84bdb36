# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`command_line`: the commands by name. What a command imports is imported when it runs, so that each is quick."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from importlib import import_module
from typing import Annotated, Any

import typer

EXIT_CODES = (
    "Exit codes: 0 done; 1 the policy was not, or cannot be, honoured; 2 bad input or usage; "
    "3 the environment: engine, library, driver, device or memory; 4 a verification or a search is undecided."
)

#: Groups of the help.
SEE, LOCK, TUNE, SERVE, MACHINE = "See what runs", "Lock and verify", "Tune and compile", "Serve", "This machine"

app = typer.Typer(
    name="xrt",
    help="Run a model under a policy, and see what was decided and what really ran.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(epilog=EXIT_CODES)
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=lambda value: _version(value), is_eager=True, help="Show the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks. XPURUNTIME_DEBUG=1 does the same.")] = False,
) -> None:
    """Run a model under a policy, and see what was decided and what really ran."""


def _version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        from xpuruntime.cli.output import print_plain

        print_plain(f"xpuruntime {version('xpuruntime')}")
        raise typer.Exit(0)


#: Module, function and group of every command.
_COMMANDS = {
    "run": ("run", "run", SEE),
    "bench": ("run", "bench", SEE),
    "profile": ("run", "profile", SEE),
    "plan": ("plan", "plan", SEE),
    "compare": ("compare", "compare", SEE),
    "explain": ("plan", "explain", SEE),
    "demo": ("run", "demo", SEE),
    "policy": ("plan", "policy_app", SEE),
    "lock": ("lock", "lock", LOCK),
    "log": ("lock", "log", LOCK),
    "index": ("lock", "index", LOCK),
    "determinism": ("verify", "determinism", LOCK),
    "diff": ("compare", "diff", LOCK),
    "bisect": ("compare", "bisect", LOCK),
    "export": ("lock", "export", LOCK),
    "verify": ("verify", "verify", LOCK),
    "compile": ("tune", "compile_", TUNE),
    "tune": ("tune", "tune", TUNE),
    "oip-check": ("serve", "oip_check", SERVE),
    "serve": ("serve", "serve", SERVE),
    "devices": ("machine", "devices", MACHINE),
    "doctor": ("machine", "doctor", MACHINE),
    "kernels": ("machine", "kernels", MACHINE),
}


class _Commands(MutableMapping[str, Any]):
    """The commands by name, each made when it is first looked up: one command does not pay for twenty."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            module, function, group = _COMMANDS[name]
            command = getattr(import_module(f"xpuruntime.cli.commands.{module}"), function)
            parent = typer.Typer(add_completion=False, rich_markup_mode=app.rich_markup_mode)
            if isinstance(command, typer.Typer):
                parent.add_typer(command, name=name, epilog=EXIT_CODES, rich_help_panel=group)
            else:
                parent.command(name, epilog=EXIT_CODES, rich_help_panel=group)(command)
            parent.callback()(lambda: None)
            self._made[name] = typer.main.get_command(parent).commands[name]  # type: ignore[attr-defined]
        return self._made[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._made[name] = command

    def __delitem__(self, name: str) -> None:
        del self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_COMMANDS)

    def __len__(self) -> int:
        return len(_COMMANDS)


def command_line() -> Any:
    """Return the command line as a callable, whose commands are made as they are used."""
    group: Any = typer.main.get_command(app)
    group.commands = _Commands()
    return group
