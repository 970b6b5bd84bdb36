# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`main`: run a command, turn errors into messages and exit codes."""

from __future__ import annotations

import contextlib
import difflib
import errno
import io
import os
import re
import shlex
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xpuruntime.cli.exit_codes import ExitCode, exit_code_of
from xpuruntime.cli.interrupts import Interrupts
from xpuruntime.errors import XpuRuntimeWarning

#: Options of typer that end the process.
_COMPLETION = frozenset({"--show-completion", "--install-completion"})
#: Options whose answer is text on stdout, also beside ``--json``.
_HELP = frozenset({"--help", "-h", "--version"})


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    interrupts = Interrupts() if argv is None else None
    if interrupts is not None:
        interrupts.end_process()
    _open_closed_streams()
    _escape_what_streams_lack()
    try:
        code = int(run(sys.argv[1:] if argv is None else argv, interrupts))
        if interrupts is not None and interrupts.happened:  # also where something swallowed the exception
            code = ExitCode.INTERRUPTED
    finally:
        if interrupts is not None:
            interrupts.let_finish()
    raise SystemExit(code)


def run(argv: Sequence[str], interrupts: Interrupts | None = None) -> int:
    """Run one command line and return its exit code. Nothing is raised, except under ``--debug``."""
    arguments = list(argv)
    if "_XRT_COMPLETE" in os.environ:
        return _complete()
    as_json = "--json" in arguments
    debug = "--debug" in arguments or os.environ.get("XPURUNTIME_DEBUG", "") not in ("", "0")
    try:
        with warnings.catch_warnings():
            _show_warnings_plainly(again=arguments[:1] == ["serve"])  # each model that is loaded says its own
            if not as_json or _HELP.intersection(arguments):
                return _call(arguments, interrupts)
            from xpuruntime.cli.output import results_apart

            with results_apart():
                return _call(arguments, interrupts)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BaseException as error:  # also what code of the user raises that is no Exception
        if interrupts is not None and interrupts.happened:  # an import made another error of it
            return ExitCode.INTERRUPTED
        if _is_closed_pipe(error):
            _silence_stdout()
            return ExitCode.CLOSED_PIPE
        if debug:
            raise
        return _report(error, exit_code_of(error), as_json)


def _is_closed_pipe(error: BaseException) -> bool:
    """Whether the reader of stdout has gone, of which typer and rich make a SystemExit."""
    return isinstance(error.__context__ if isinstance(error, SystemExit) else error, BrokenPipeError)


def _complete() -> int:
    """Print what a shell completes. It shows nothing but that at its prompt, whatever happens: no warning, no error."""
    from xpuruntime.cli.app import command_line

    with (
        contextlib.suppress(BaseException),
        Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stderr(nowhere),
    ):
        command_line()(args=[], prog_name="xrt", standalone_mode=False)
    return ExitCode.OK


def _call(arguments: list[str], interrupts: Interrupts | None) -> int:
    import typer

    from xpuruntime.cli.app import command_line
    from xpuruntime.cli.output import error_line, print_json, results

    if interrupts is not None:
        interrupts.raise_once()
    # Newer typer carries its own click; its class of usage errors is found through the one it exports.
    usage: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
    try:
        result: Any = command_line()(args=arguments, prog_name="xrt", standalone_mode=False)
    except SystemExit as error:  # typer leaves so when it has shown or installed the script of a shell
        if not _COMPLETION.intersection(arguments) or not isinstance(error.code, int):
            raise
        return error.code
    except typer.Abort:
        return ExitCode.INTERRUPTED
    except usage as error:
        text = error.format_message()
        context = getattr(error, "ctx", None)
        named = [word for word in arguments[:1] if not word.startswith("-")]
        command = context.command_path if context is not None else " ".join(["xrt", *named])
        text = _with_fix(text, arguments, command)
        if "--json" in arguments:
            print_json(_error_record("UsageError", text, ExitCode.BAD_INPUT))
        if text:  # without arguments, the help has been shown already
            error_line(text)
            error_line(f"`{command} --help` lists what it takes", label="help")
        return ExitCode.BAD_INPUT
    results().flush()
    return int(result) if isinstance(result, int) else ExitCode.OK


#: Options by the ending of a file that is given without its option.
_OPTIONS = {".lock": "--lock", ".yaml": "--policy", ".yml": "--policy", ".json": "--policy", ".npz": "--input @"}


#: Options of other programs, and what is meant.
_MEANT = {
    "--batch-size": "--dim N=8, with the name of the open dimension",
    "--config": "xrt serve serve.yaml: the file is the argument",
    "--gpu": "--device cuda:0",
    "--host": "--http HOST:PORT",
    "--model": "the model is an argument: xrt COMMAND MODEL",
    "--out": "--html FILE for the page, or -o FILE",
    "--port": "--http 127.0.0.1:PORT, and --grpc off or HOST:PORT",
    "--providers": "--engine onnxruntime --device cpu",
    "--report": "--html FILE for the page, or -o FILE",
    "--verbose": "XPURUNTIME_DEBUG=1 for tracebacks; decisions are records of Python's logging",
}


#: Commands that others have, and what does the same here.
_COMMANDS = {
    "convert": "compile model.onnx -o model.xrt",
    "optimize": "tune model.onnx --input random",
    "quantize": "run model.onnx --precision int8 --calibration samples.npz",
    "version": "--version",
}

#: Command to a line that runs in a folder with the files that it names.
EXAMPLES = {
    "bench": "xrt bench model.onnx",
    "bisect": "xrt bisect onnxruntime 1.27.0..1.31.1 model.onnx --claim numerics",
    "compare": "xrt compare model.onnx",
    "compile": "xrt compile model.onnx -o model.xrt",
    "determinism": "xrt determinism model.onnx",
    "diff": "xrt diff before.lock after.lock",
    "explain": "xrt explain model.onnx",
    "export": "xrt export model.lock --to ort-python -o exported",
    "index": "xrt index .",
    "lock": "xrt lock model.onnx",
    "log": "xrt log model.lock",
    "oip-check": "xrt oip-check http://127.0.0.1:8000",
    "plan": "xrt plan model.onnx",
    "policy calibration": "xrt policy calibration model.onnx samples.npz",
    "policy check": "xrt policy check policy.yaml",
    "policy convert": "xrt policy convert policy.yaml policy.json",
    "policy show": "xrt policy show policy.yaml",
    "profile": "xrt profile model.onnx",
    "run": "xrt run model.onnx",
    "serve": "xrt serve model.onnx",
    "tune": "xrt tune model.onnx --input random",
    "verify": "xrt verify model.onnx",
}


def _with_fix(text: str, arguments: list[str], command: str) -> str:
    """Return a usage error with a line that works, or with what is meant by an option, a command or a file."""
    if text.startswith("Missing ") and (example := EXAMPLES.get(command.removeprefix("xrt "))):
        return f"{text.removesuffix('.')}. Fix: {example}"
    if unknown := re.match(r"No such command '([^']*)'", text):
        word = f"{command} {unknown[1]}".removeprefix("xrt ")
        near = difflib.get_close_matches(word, [*EXAMPLES, "demo", "devices", "doctor", "kernels"], n=1)
        return f"{unknown[0]}. Fix: xrt {_COMMANDS.get(word) or (near[0] if near else '--help')}"
    unknown = re.match(r"No such option: (--[\w-]+)(?: \(Possible options: (.*)\))?", text)
    if unknown and unknown[1] in _MEANT:
        return f"{unknown[0].partition(' (')[0]}. Fix: {_MEANT[unknown[1]]}"
    near = difflib.get_close_matches(unknown[1], (unknown[2] or "").split(", "), n=1, cutoff=0.8) if unknown else []
    if unknown and near:
        words = [re.sub(rf"^{unknown[1]}(?=$|=)", near[0], word) for word in arguments]
        return f"{unknown[0].partition(' (')[0]}. Fix: {shlex.join(['xrt', *words])}"
    extra = re.fullmatch(r"Got unexpected extra arguments? \((.+)\)", text.replace("argument(s)", "argument"))
    if extra is None or extra[1] not in arguments:
        return text
    place = arguments.index(extra[1])
    option = _OPTIONS.get(os.path.splitext(extra[1])[1])  # noqa: PTH122 - of an argument
    if option is None:
        words = [*command.split()[:1], *arguments[:place], *arguments[place + 1 :]]
        return f"{extra[1]} is one argument too many. Fix: {shlex.join(words)}"
    stated = [option, extra[1]] if option[-1] != "@" else [*option.split()[:1], f"@{extra[1]}"]
    words = [*command.split()[:1], *arguments[:place], *arguments[place + 1 :], *stated]
    return f"{extra[1]} is a file without an option. Fix: {shlex.join(words)}"


def _report(error: BaseException, code: ExitCode, as_json: bool) -> ExitCode:
    """Say what has failed, and return the exit code: a package that cannot be imported is no bug of xpuruntime."""
    from xpuruntime.cli.exit_codes import broken_import, missing_module
    from xpuruntime.cli.output import error_line, print_json

    text = str(error) or type(error).__name__
    # A file would name its line.
    text = re.sub(r"(?m)^( *)ExecutionPolicy\.(device|engine|precision): ", r"\1--\2: ", text)
    if isinstance(error, ModuleNotFoundError):
        text = text if code is ExitCode.BUG else missing_module(error) or text
    elif code is ExitCode.BUG or isinstance(error, ImportError):
        broken = broken_import(error)
        code = code if broken is None else ExitCode.ENVIRONMENT
        text = broken or text
    if isinstance(error, OSError) and error.strerror:
        full = error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)  # files are named, so it is standard output
        where = error.filename or ("standard output" if full else None)
        text = f"{where}: {error.strerror}" if where else error.strerror
    if as_json:
        details = {name: getattr(error, name, None) for name in ("device", "engine")}
        try:
            print_json(_error_record(type(error).__name__, text, code, **details))
            sys.stdout.flush()
        except OSError:  # it is standard output that cannot be written
            _silence_stdout()
    if code is ExitCode.BUG:
        error_line(f"{type(error).__name__}: {text}")
        error_line("this is a bug in xpuruntime; run again with `xrt --debug ...` for the traceback", label="help")
    else:
        error_line(text)
    if isinstance(error, OSError) and error.filename is None:
        _silence_stdout()  # what is still in its buffer would fail once more at exit
    return code


def _error_record(kind: str, text: str, code: ExitCode, **details: str | None) -> dict[str, Any]:
    return {"schema": "xpuruntime.error/1", "error": {"type": kind, "message": text, "exit_code": int(code), **details}}


def _show_warnings_plainly(*, again: bool) -> None:
    """Print each of xpuruntime's warnings as one line on stderr; leave those of other packages as they are."""
    from xpuruntime.cli.output import error_line

    shown = warnings.showwarning
    printed: set[str] = set()  # a lock opens the model twice, under the policy and as locked

    def show(message: Warning | str, category: type[Warning], *rest: Any, **options: Any) -> None:
        if issubclass(category, XpuRuntimeWarning):
            if again or str(message) not in printed:
                printed.add(str(message))
                error_line(str(message), label="warning")
        else:
            shown(message, category, *rest, **options)

    warnings.showwarning = show
    warnings.simplefilter("always", XpuRuntimeWarning)


def _open_closed_streams() -> None:
    """Stand in for streams that the caller has closed (``>&-``), which Python gives as ``None``."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - lives as long as we do


def _escape_what_streams_lack() -> None:
    """Write letters that the encoding of a stream lacks as escapes, as in a locale that is not UTF-8."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _silence_stdout() -> None:
    """Keep Python from failing again when it flushes what cannot be written: a closed pipe, a full disk."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        return
