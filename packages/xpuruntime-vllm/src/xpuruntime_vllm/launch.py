# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`LLM` and ``xrt-vllm serve``: start vLLM by a policy, and only with the evidence of every worker."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from xpuruntime.errors import EngineError, InputError, PolicyError
from xpuruntime_vllm.settings import ServerSettings, read_policy
from xpuruntime_vllm.worker import EVIDENCE, LOCK, SETTINGS, refusal

_PLUGIN = "xpuruntime"
#: Options under which the launcher would not see where the server answers.
_UNSEEN = ("--uds", "--config", "--ssl-keyfile", "--ssl-certfile")
_USAGE = "usage: xrt-vllm serve|lock MODEL --policy POLICY [--lock LOCK] [-o FILE] [options of vllm serve]\n"


def environment_of(settings: ServerSettings, folder: str, lock: str | os.PathLike[str] | None) -> dict[str, str]:
    """Return the variables that carry the policy into every process; a list of plugins is given the plugin's name."""
    listing = f"{settings.engine.upper()}_PLUGINS"
    added = {SETTINGS: json.dumps(dataclasses.asdict(settings)), EVIDENCE: folder} | settings.environment
    if lock is not None:
        if not Path(lock).is_file():
            raise InputError(f"the lock '{lock}' is not found. Fix: xrt-vllm lock MODEL --policy POLICY -o {lock}")
        added[LOCK] = str(Path(lock).resolve())
    plugins = [name.strip() for name in os.environ.get(listing, "").split(",") if name.strip()]
    if listing in os.environ and _PLUGIN not in plugins:
        added[listing] = ",".join([*plugins, _PLUGIN])
    return added


def _documents(folder: str) -> dict[int, dict[str, Any]]:
    """Return the evidence so far, by the number of the worker."""
    documents = (json.loads(path.read_text(encoding="utf-8")) for path in Path(folder).glob("rank*.json"))
    return {document["rank"]: document for document in documents}


def evidence_in(folder: str, engine: str) -> list[dict[str, Any]]:
    """Return the evidence of every worker, and refuse where one is missing: its plugin did not run."""
    documents = _documents(folder)
    workers = max((document["workers"] for document in documents.values()), default=1)
    for rank in range(workers):
        if not documents.get(rank, {}).get("warmed"):
            msg = (
                f"worker {rank} of {workers} gave no evidence: the plugin 'xpuruntime' did not run there. Fix: install "
                f"xpuruntime-vllm into the environment of {engine}, and leave it in {engine.upper()}_PLUGINS"
            )
            raise EngineError(msg, engine=engine)
    return [documents[rank] for rank in range(workers)]


def save_lock(evidence: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write the evidence of a worker as a lock."""
    Path(path).write_text(json.dumps(evidence, indent=1, sort_keys=True) + "\n", encoding="utf-8")


class LLM:
    """vLLM's `LLM` under a policy.

    Parameters
    ----------
    model : str
        As vLLM takes it.
    policy : Policy or mapping or path
        See `xpuruntime_vllm.settings.read_policy`.
    lock : path, optional
        A saved evidence that has to hold: packages, configuration, the kernel of every layer.
    **arguments
        Of vLLM's engine; one that contradicts the policy is refused.

    Attributes
    ----------
    evidence : list of dict
        Of each worker, by rank.

    Raises
    ------
    PolicyError
        A worker selected another kernel than requested, under ``mode: strict``, or the lock does not hold.
    EngineError
        A worker gave no evidence, or vLLM did not start.
    """

    def __init__(
        self, model: str, policy: Any, *, lock: str | os.PathLike[str] | None = None, **arguments: Any
    ) -> None:
        settings = read_policy(policy)
        stated = settings.arguments
        for name in arguments.keys() & stated.keys():
            if arguments[name] != stated[name]:
                msg = f"{name}={arguments[name]!r} contradicts the policy, which sets {stated[name]!r}"
                raise InputError(f"{msg}. Fix: leave it out, or change the policy")
        import vllm

        self._folder = tempfile.mkdtemp(prefix="xrt-vllm-")
        added = environment_of(settings, self._folder, lock)
        before = {name: os.environ.get(name) for name in added}
        os.environ.update(added)
        try:
            try:
                self._llm = vllm.LLM(model=model, **{**settings.arguments, **arguments})
            except Exception as error:
                raise self._refusal() or error from None
            self.evidence = evidence_in(self._folder, "vllm")
        except BaseException:
            self.close()
            raise
        finally:
            for name, value in before.items():
                os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)

    def _refusal(self) -> PolicyError | None:
        """Return why a worker refused, where it was one of ours: vLLM's engine process passes no reason on."""
        for rank, document in sorted(_documents(self._folder).items()):
            if refused := refusal(document, f"rank{rank}"):
                return PolicyError(refused)
        return None

    def __getattr__(self, name: str) -> Any:
        """Whatever vLLM's `LLM` has."""
        return getattr(self.__dict__["_llm"], name) if "_llm" in self.__dict__ else object.__getattribute__(self, name)

    def save_lock(self, path: str | os.PathLike[str]) -> None:
        """Write the evidence of the first worker as a lock; every worker is compared with it at the next start."""
        save_lock(self.evidence[0], path)

    def close(self) -> None:
        """End vLLM's engine, and remove the scratch folder."""
        engine = self.__dict__.pop("_llm", None)
        if engine is not None:
            with contextlib.suppress(Exception):
                engine.llm_engine.engine_core.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def main(argv: list[str] | None = None) -> int:
    """Run ``xrt-vllm serve MODEL --policy POLICY [--lock LOCK] [vLLM's options]`` or ``xrt-vllm lock …``."""
    words = list(sys.argv[1:] if argv is None else argv)
    if len(words) < 2 or words[0] not in ("serve", "lock"):
        sys.stderr.write(_USAGE)
        return 2
    if words[0] == "serve":

        def start(model: str, settings: ServerSettings, rest: list[str]) -> list[str]:
            return ["vllm", "serve", model, *options_of(settings), *rest]

        return served(words[1], words[2:], read_policy, start, "8000")

    def lock(model: str, policy: str, _lock: str | None, output: str | None, _rest: list[str]) -> int:
        with LLM(model, policy) as llm:
            llm.save_lock(output or "vllm.lock")
        return 0

    return _told(words[1], words[2:], lock)


def options_of(settings: ServerSettings) -> list[str]:
    """Return the arguments of an engine as options of its command; those that are true are flags."""
    options: list[str] = []
    for name, value in settings.arguments.items():
        options.append(f"--{name.replace('_', '-')}")
        if value is not True:
            options.append(json.dumps(value) if isinstance(value, dict) else str(value))
    return options


def served(model: str, options: list[str], read: Any, start: Any, port: str) -> int:
    """Run a server by the policy among `options`; `start` gives its command of model, settings and other options."""

    def serve(model: str, policy: str, lock: str | None, output: str | None, rest: list[str]) -> int:
        settings = read(policy)
        unseen = next((word for word in rest if word.partition("=")[0] in _UNSEEN), None)
        if unseen is not None:
            msg = f"with {unseen} the launcher does not see whether the server answers without evidence"
            raise InputError(f"{msg}. Fix: state other options one by one, and have a proxy in front end TLS")
        return _serve(start(model, settings, rest), settings, lock, output, _address(rest, port))

    return _told(model, options, serve)


def _told(model: str, rest: list[str], run: Any) -> int:
    """Run what a command does with a policy, and return its exit code; errors go to stderr."""
    taken: dict[str, str | None] = {"--policy": None, "--lock": None, "-o": None}
    for name in taken:
        if name in rest:
            at = rest.index(name)
            if at + 1 >= len(rest):
                sys.stderr.write(f"error: {name} takes a file" + "\n")
                return 2
            taken[name] = rest[at + 1]
            del rest[at : at + 2]
    if taken["--policy"] is None:
        sys.stderr.write("error: no policy. Fix: state --policy policy.yaml" + "\n")
        return 2
    try:
        code: int = run(model, taken["--policy"], taken["--lock"], taken["-o"], rest)
    except (PolicyError, InputError) as error:
        sys.stderr.write(f"error: {error}" + "\n")
        return 1 if isinstance(error, PolicyError) else 2
    except EngineError as error:
        sys.stderr.write(f"error: {error}" + "\n")
        return 3
    except KeyboardInterrupt:  # the server gets Ctrl-C of a terminal, too, and has been waited for
        return 130
    return code


def _address(rest: list[str], port: str) -> str:
    """Return where a server with such options answers."""
    stated = {"--host": "127.0.0.1", "--port": port}
    for at, word in enumerate(rest):
        name, equals, value = word.partition("=")
        if name in stated:
            stated[name] = value if equals else "".join(rest[at + 1 : at + 2])
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(stated["--host"], stated["--host"])
    return f"http://{host}:{stated['--port']}"


def _serve(command: list[str], settings: ServerSettings, lock: str | None, output: str | None, address: str) -> int:
    """Run a server; end it where it answers and a worker has given no evidence. Writes that of the first as a lock."""
    with tempfile.TemporaryDirectory(prefix="xrt-vllm-") as folder:
        server = subprocess.Popen(command, env={**os.environ, **environment_of(settings, folder, lock)})
        # What ends the launcher ends the server.
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        try:
            while server.poll() is None and not _answers(address):
                time.sleep(0.2)
            if server.poll() is None:
                evidence = evidence_in(folder, settings.engine)
                workers = len(evidence)
                if output is not None:
                    save_lock(evidence[0], output)
                sys.stderr.write(f"xpuruntime: the policy holds in {workers} worker{'s' * (workers > 1)}\n")
            code = server.wait()
            refused = [refusal(document, f"rank{rank}") for rank, document in sorted(_documents(folder).items())]
            for line in filter(None, refused):
                sys.stderr.write(f"error: {line}" + "\n")
            return 1 if any(refused) else code
        finally:
            signal.signal(signal.SIGTERM, before)
            if server.poll() is None:
                server.terminate()
                try:
                    server.wait(30)
                except subprocess.TimeoutExpired:
                    server.kill()


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=1):
            return True
    except (urllib.error.URLError, OSError, ValueError):
        return False


if __name__ == "__main__":
    raise SystemExit(main())
