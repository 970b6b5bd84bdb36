# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Worker processes: every way in which one fails is named, and none is left behind."""

from __future__ import annotations

import gc
import math
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
import venv
from pathlib import Path

import pytest

from xpuruntime import runtime
from xpuruntime.errors import InputError, XpuRuntimeError
from xpuruntime.runtime.worker import FailureKind, Worker, WorkerFailure

HERE = Path(__file__).parent
F = "worker_functions:"


def start(**options) -> Worker:
    return Worker(pythonpath=[HERE], timeout=options.pop("timeout", 20), **options)


def is_alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def gone(*pids: int, within: float = 5.0) -> bool:
    end = time.monotonic() + within
    while any(map(is_alive, pids)) and time.monotonic() < end:
        time.sleep(0.01)
    return not any(map(is_alive, pids))


def open_files() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


#: Function, arguments of the worker, expected kind and what the message has.
FAILURES = [
    ("segfault", {}, "crashed", "SIGSEGV"),
    ("kill_self", {}, "crashed", "SIGKILL"),
    ("exit_at_once", {}, "exited", "exit status 7"),
    ("exit_as_python_does", {}, "exited", "no licence"),
    ("hang", {"timeout": 0.3}, "timeout", "more than 0.3 s"),
    ("hang_with_gil", {"timeout": 0.3}, "timeout", "more than 0.3 s"),
    ("stop", {"timeout": 0.3}, "timeout", "more than 0.3 s"),
    ("hog", {"memory_limit": 200 << 20}, "out_of_memory", "over the limit of 209,715,200"),
    ("child_hog", {"memory_limit": 200 << 20}, "out_of_memory", "over the limit of 209,715,200"),
    ("close_all_files", {}, "exited", "exit status"),
    ("close_pipes_and_stay", {}, "protocol", "closed the pipe"),
    ("write_to_all_files", {}, "protocol", "not of its protocol"),
    ("forked_child_then_die", {}, "exited", "exit status 3"),
    ("interrupt", {}, "crashed", "SIGINT"),
]


@pytest.mark.parametrize(("function", "options", "kind", "text"), FAILURES, ids=[row[0] for row in FAILURES])
def test_a_worker_that_ends_is_a_failure_with_a_name(function, options, kind, text):
    before = open_files()
    worker = start(**options)
    pid = worker.facts["pid"]
    failure = worker.attempt(F + function).failure
    assert failure is not None
    assert failure.kind == kind
    assert text in str(failure)
    assert F + function in failure.reason or kind == "protocol"
    assert not worker.alive
    again = worker.attempt(F + "echo").failure
    assert again is not None
    assert again.reason == failure.reason, "the next call says what had happened"
    assert not Path(f"/proc/{pid}").exists(), "a zombie is left"
    assert open_files() == before


def test_the_output_and_the_stack_of_a_crash_are_quoted():
    with start() as worker, pytest.raises(WorkerFailure) as caught:
        worker.call(F + "segfault")
    failure = caught.value
    assert isinstance(failure, XpuRuntimeError)
    assert failure.signal == "SIGSEGV"
    assert "about to read address 0" in failure.output
    assert "in segfault" in failure.output, "the Python stack at the fault"


@pytest.mark.parametrize(
    ("function", "kind", "names"),
    [
        ("fail", "exception", ("FileNotFoundError", "OSError")),
        ("memory_error", "out_of_memory", ("MemoryError",)),
        ("not_json", "exception", ("TypeError",)),
        ("no_such_function", "exception", ("AttributeError",)),
    ],
)
def test_an_exception_leaves_the_worker_usable(function, kind, names):
    with start() as worker:
        failure = worker.attempt(F + function, called="the step").failure
        assert failure is not None
        assert failure.kind is FailureKind(kind)
        assert failure.exceptions[: len(names)] == names
        assert failure.error.startswith(f"{names[0]}: ")
        assert failure.reason == f"the step raised {failure.error}"
        assert worker.call(F + "echo", a=1) == {"a": 1}


def test_what_a_worker_prints_is_not_taken_for_an_answer_and_is_bounded():
    with start() as worker:
        assert worker.call(F + "print_much", lines=20_000) == 20_000
        assert len(worker.output) <= 1 << 16
        assert "line 19999" in worker.output
        for function in ("replace_stdout", "close_output"):
            assert worker.call(F + function) == "seen"
            assert worker.call(F + "echo", a=2) == {"a": 2}


def test_values_and_arguments_are_exact_and_may_be_long():
    values = {
        "float": 0.1 + 0.2,
        "nan": [math.inf],
        "text": "é\n\u2028",
        "none": None,
        "big": 2**70,
        "long": "y" * 300_000,
    }
    with start() as worker:
        assert worker.call(F + "echo", **values) == values
        assert len(worker.call(F + "long_answer", size=3_000_000)) == 3_000_000
        failure = worker.attempt(F + "long_answer", size=70 << 20).failure
    assert failure is not None
    assert failure.kind == "protocol"


def test_children_of_a_worker_end_with_it():
    with start() as worker:
        child = worker.call(F + "child_left_behind")
        assert is_alive(child)
    assert gone(child, worker.facts["pid"])
    worker = start()
    failure = worker.attempt(F + "forked_child_then_die").failure
    assert failure is not None
    assert gone(int(failure.output.split()[1]))


def test_a_forgotten_worker_ends():
    worker = start()
    pid = worker.facts["pid"]
    del worker
    gc.collect()
    assert gone(pid)


PARENT = """
    import sys
    from xpuruntime.runtime.worker import Worker
    worker = Worker(pythonpath=[{here!r}])
    child = worker.call("worker_functions:child_left_behind")
    print(worker.facts["pid"], child, flush=True)
    worker.call("worker_functions:{function}", timeout=600)
"""


@pytest.mark.parametrize(
    ("how", "function"), [("SIGKILL", "hang"), ("SIGKILL", "hang_with_gil"), ("SIGTERM", "hang"), ("SIGINT", "hang")]
)
def test_no_orphan_when_the_parent_is_killed_or_interrupted(how, function):
    code = textwrap.dedent(PARENT.format(here=str(HERE), function=function))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pids = list(map(int, parent.stdout.readline().split()))
        assert len(pids) == 2
        assert all(map(is_alive, pids))
        time.sleep(0.2)  # until it waits inside of the call
        parent.send_signal(getattr(signal, how))
        _, errors = parent.communicate(timeout=20)
    assert gone(*pids)
    assert (b"KeyboardInterrupt" in errors) == (how == "SIGINT")


def test_a_worker_lives_on_when_the_thread_that_started_it_ends():
    """As it would not with `PR_SET_PDEATHSIG`."""
    import threading

    workers: list[Worker] = []
    thread = threading.Thread(target=lambda: workers.append(start()))
    thread.start()
    thread.join()
    with workers[0] as worker:
        time.sleep(0.1)
        assert worker.call(F + "echo", a=3) == {"a": 3}


def test_the_environment_is_what_was_asked(monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_PARENT", "1")
    with start() as worker:
        environment = worker.call(F + "where")
        assert environment["environment"]["SECRET_OF_THE_PARENT"] == "1"
        assert str(HERE) in environment["path"]
        assert "" not in environment["path"]
        assert not any(Path(path) == Path(runtime.__path__[0]) for path in environment["path"])
    with start(clean=True, environment={"OMP_NUM_THREADS": "1", "LANG": None}) as worker:
        environment = worker.call(F + "where")["environment"]
        assert "SECRET_OF_THE_PARENT" not in environment
        assert "LANG" not in environment
        assert environment["OMP_NUM_THREADS"] == "1"


def test_an_interpreter_without_xpuruntime_will_do(tmp_path, monkeypatch):
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    monkeypatch.setenv("PYTHONPATH", str(HERE / "not_for_others"))
    with Worker(tmp_path / "bare" / "bin" / "python", pythonpath=[HERE], timeout=20) as worker:
        assert Path(worker.facts["executable"]).parent == tmp_path / "bare" / "bin"
        assert not any("not_for_others" in path for path in worker.call(F + "where")["path"])
        failure = worker.attempt("xpuruntime:load").failure
        assert failure is not None
        assert failure.exceptions[0] == "ModuleNotFoundError"


def test_what_is_no_interpreter_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"is not an executable file. Fix: give the path of a Python interpreter"):
        Worker("/no/such/python")
    with pytest.raises(InputError, match=r"is not an executable file"):
        Worker(__file__)
    with pytest.raises(WorkerFailure, match=r"ended in starting /bin/false with exit status 1\. Fix: give the path"):
        Worker("/bin/false")
    garbage = tmp_path / "gar bage"
    garbage.write_text("no program")
    garbage.chmod(0o755)
    with pytest.raises(InputError, match=r"cannot start .*gar bage: Exec format error\. Fix: give the path"):
        Worker(garbage)
    with pytest.raises(WorkerFailure) as caught:
        Worker("/bin/echo")
    assert caught.value.kind in {"exited", "protocol"}


def test_a_failure_can_be_sent_to_another_process():
    with start() as worker:
        failure = worker.attempt(F + "exit_at_once").failure
    copy = pickle.loads(pickle.dumps(failure))
    assert (copy.kind, copy.exit_code, str(copy)) == ("exited", 7, str(failure))


def test_a_closed_worker_says_so():
    worker = start()
    worker.close()
    worker.close()
    with pytest.raises(WorkerFailure, match=r"cannot call worker_functions:echo: the worker is closed"):
        worker.call(F + "echo")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_a_worker_and_what_it_starts_begin_on_its_cores():
    core = max(os.sched_getaffinity(0))
    with start(cores=[core]) as worker:
        assert worker.call(F + "cores") == [[core], [core], [core]]
    with pytest.raises(WorkerFailure, match=r"in starting with exit status .*Invalid argument"):
        start(cores=[1 << 12])


def test_a_call_fails_when_another_thread_kills_the_worker():
    with start(timeout=60) as worker:
        pid = worker.facts["pid"]
        threading.Timer(0.3, worker.kill).start()
        failure = worker.attempt(F + "hang").failure
        assert failure is not None
        assert (failure.kind, failure.signal) == ("crashed", "SIGKILL")
        worker.kill()
    assert gone(pid)


def test_a_function_asks_the_parent_while_it_runs():
    with start() as worker:
        found = worker.call(F + "ask_each", values=[1, "two", None], serve=lambda value: [value, value])
        assert found == [[1, 1], ["two", "two"], [None, None]]
        assert worker.call(F + "ask_from_threads", count=20, serve=lambda value: value) == list(range(20))
        assert "cannot be asked in a child" in worker.call(F + "ask_in_a_child", serve=pytest.fail)
        assert worker.call(F + "echo", value=3) == {"value": 3}


def test_what_the_parent_takes_to_answer_counts_as_time_of_the_call():
    with start() as worker, pytest.raises(WorkerFailure, match="more than 3 s"):
        worker.call(F + "ask_then_hang", timeout=3, serve=lambda value: value)


def test_a_worker_whose_question_fails_is_ended():
    with start() as worker:
        with pytest.raises(ZeroDivisionError):
            worker.call(F + "ask_each", values=[0], serve=lambda value: 1 // value)
        assert not worker.alive
