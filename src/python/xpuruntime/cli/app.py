# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`app`: the commands by name. Commands import what they need when they run, so that ``--help`` is quick."""

from __future__ import annotations

from typing import Annotated

import typer

from xpuruntime.cli.commands import compare, lock, machine, plan, run, serve, tune, verify

__all__ = ["app"]

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


app.command("run", epilog=EXIT_CODES, rich_help_panel=SEE)(run.run)
app.command("bench", epilog=EXIT_CODES, rich_help_panel=SEE)(run.bench)
app.command("profile", epilog=EXIT_CODES, rich_help_panel=SEE)(run.profile)
app.command("plan", epilog=EXIT_CODES, rich_help_panel=SEE)(plan.plan)
app.command("compare", epilog=EXIT_CODES, rich_help_panel=SEE)(compare.compare)
app.command("explain", epilog=EXIT_CODES, rich_help_panel=SEE)(plan.explain)
app.add_typer(plan.policy_app, name="policy", epilog=EXIT_CODES, rich_help_panel=SEE)
app.command("demo", epilog=EXIT_CODES, rich_help_panel=SEE)(run.demo)
app.command("lock", epilog=EXIT_CODES, rich_help_panel=LOCK)(lock.lock)
app.command("determinism", epilog=EXIT_CODES, rich_help_panel=LOCK)(verify.determinism)
app.command("diff", epilog=EXIT_CODES, rich_help_panel=LOCK)(compare.diff)
app.command("bisect", epilog=EXIT_CODES, rich_help_panel=LOCK)(compare.bisect)
app.command("export", epilog=EXIT_CODES, rich_help_panel=LOCK)(lock.export)
app.command("verify", epilog=EXIT_CODES, rich_help_panel=LOCK)(verify.verify)
app.command("compile", epilog=EXIT_CODES, rich_help_panel=TUNE)(tune.compile_)
app.command("tune", epilog=EXIT_CODES, rich_help_panel=TUNE)(tune.tune)
app.command("oip-check", epilog=EXIT_CODES, rich_help_panel=SERVE)(serve.oip_check)
app.command("serve", epilog=EXIT_CODES, rich_help_panel=SERVE)(serve.serve)
app.command("devices", epilog=EXIT_CODES, rich_help_panel=MACHINE)(machine.devices)
app.command("doctor", epilog=EXIT_CODES, rich_help_panel=MACHINE)(machine.doctor)
app.command("kernels", epilog=EXIT_CODES, rich_help_panel=MACHINE)(machine.kernels)
