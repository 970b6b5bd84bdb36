# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`LLM` and ``xrt-vllm serve``: start vLLM by a policy, and only with the evidence of every worker."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from xpuruntime.errors import EngineError, InputError, PolicyError
from xpuruntime_vllm.settings import VllmSettings, read_policy
from xpuruntime_vllm.worker import EVIDENCE, LOCK, SETTINGS, refusal

_PLUGIN = "xpuruntime"
_USAGE = "usage: xrt-vllm serve|lock MODEL --policy POLICY [--lock LOCK] [-o FILE] [options of vllm serve]\n"


def _environment(settings: VllmSettings, folder: str, lock: str | os.PathLike[str] | None) -> dict[str, str]:
    """Return the variables that carry the policy into every process; a `VLLM_PLUGINS` is given the plugin's name."""
    added = {SETTINGS: json.dumps(dataclasses.asdict(settings)), EVIDENCE: folder} | settings.environment
    if lock is not None:
        if not Path(lock).is_file():
            raise InputError(f"the lock '{lock}' is not found. Fix: xrt-vllm lock MODEL --policy POLICY -o {lock}")
        added[LOCK] = str(Path(lock).resolve())
    plugins = [name for name in os.environ.get("VLLM_PLUGINS", "").split(",") if name]
    if "VLLM_PLUGINS" in os.environ and _PLUGIN not in plugins:
        added["VLLM_PLUGINS"] = ",".join([*plugins, _PLUGIN])
    return added


def _evidence(folder: str, workers: int) -> list[dict[str, Any]]:
    """Return the evidence of every worker, and refuse where one is missing: its plugin did not run."""
    found = []
    for rank in range(workers):
        path = Path(folder) / f"rank{rank}.json"
        document = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if not document.get("warmed"):
            msg = (
                f"worker {rank} of {workers} gave no evidence: the plugin 'xpuruntime' did not run there. Fix: install "
                "xpuruntime-vllm into vLLM's environment, and remove it from no list of VLLM_PLUGINS"
            )
            raise EngineError(msg, engine="vllm")
        found.append(document)
    return found


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
        added = _environment(settings, self._folder, lock)
        before = {name: os.environ.get(name) for name in added}
        os.environ.update(added)
        try:
            try:
                self._llm = vllm.LLM(model=model, **{**settings.arguments, **arguments})
            except Exception as error:
                raise self._refusal() or error from None
            workers = self._llm.llm_engine.vllm_config.parallel_config.world_size
            self.evidence = _evidence(self._folder, workers)
        except BaseException:
            self.close()
            raise
        finally:
            for name, value in before.items():
                os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)

    def _refusal(self) -> PolicyError | None:
        """Return why a worker refused, where it was one of ours: vLLM's engine process passes no reason on."""
        for path in sorted(Path(self._folder).glob("rank*.json")):
            document = json.loads(path.read_text(encoding="utf-8"))
            if refused := refusal(document, path.stem):
                return PolicyError(refused)
        return None

    def __getattr__(self, name: str) -> Any:
        """Whatever vLLM's `LLM` has."""
        return getattr(self.__dict__["_llm"], name) if "_llm" in self.__dict__ else object.__getattribute__(self, name)

    def save_lock(self, path: str | os.PathLike[str]) -> None:
        """Write the evidence of the first worker as a lock; every worker is compared with it at the next start."""
        Path(path).write_text(json.dumps(self.evidence[0], indent=1, sort_keys=True) + "\n", encoding="utf-8")

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
    command, model, rest = words[0], words[1], words[2:]
    taken = {"--policy": None, "--lock": None, "-o": None}
    for name in list(taken):
        if name in rest:
            at = rest.index(name)
            if at + 1 >= len(rest):
                sys.stderr.write(f"error: {name} takes a file" + "\n")
                return 2
            taken[name] = rest[at + 1]
            del rest[at : at + 2]
    if taken["--policy"] is None:
        sys.stderr.write("error: no policy. Fix: xrt-vllm serve MODEL --policy policy.yaml" + "\n")
        return 2
    try:
        if command == "lock":
            with LLM(model, taken["--policy"]) as llm:
                llm.save_lock(taken["-o"] or "vllm.lock")
            return 0
        return _serve(model, read_policy(taken["--policy"]), taken["--lock"], rest)
    except (PolicyError, InputError) as error:
        sys.stderr.write(f"error: {error}" + "\n")
        return 1 if isinstance(error, PolicyError) else 2
    except EngineError as error:
        sys.stderr.write(f"error: {error}" + "\n")
        return 3


def _serve(model: str, settings: VllmSettings, lock: str | None, rest: list[str]) -> int:
    """Run ``vllm serve``; end it where it answers and a worker has given no evidence."""
    options = []
    for name, value in settings.arguments.items():
        options += [f"--{name.replace('_', '-')}", json.dumps(value) if isinstance(value, dict) else str(value)]
    port = rest[rest.index("--port") + 1] if "--port" in rest else "8000"
    with tempfile.TemporaryDirectory(prefix="xrt-vllm-") as folder:
        variables = {**os.environ, **_environment(settings, folder, lock)}
        server = subprocess.Popen(["vllm", "serve", model, *options, *rest], env=variables)
        try:
            while server.poll() is None and not _answers(port):
                time.sleep(0.2)
            if server.poll() is None:
                workers = max(1, len(list(Path(folder).glob("rank*.json"))))
                _evidence(folder, workers)
                sys.stderr.write(f"xrt-vllm: the policy holds in {workers} worker{'s' * (workers > 1)}\n")
            code = server.wait()
            documents = [json.loads(path.read_text(encoding="utf-8")) for path in Path(folder).glob("rank*.json")]
            return 1 if any(refusal(document, "") for document in documents) else code
        finally:
            if server.poll() is None:
                server.terminate()
                server.wait(30)


def _answers(port: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
            return True
    except (urllib.error.URLError, OSError):
        return False


if __name__ == "__main__":
    raise SystemExit(main())
