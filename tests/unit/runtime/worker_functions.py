# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Functions for worker processes: what goes wrong in them, each in one way. Only the standard library."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time


def echo(**values):
    return values


def where():
    return {"xpuruntime": "xpuruntime" in sys.modules, "path": sys.path, "environment": dict(os.environ)}


def segfault():
    print("about to read address 0")
    ctypes.string_at(0)


def kill_self():
    os.kill(os.getpid(), signal.SIGKILL)


def exit_at_once():
    os._exit(7)


def exit_as_python_does():
    sys.exit("no licence")


def hang():
    time.sleep(600)


def hang_with_gil():
    ctypes.PyDLL(None).sleep(600)


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def hog(chunk=1 << 24):
    held = []
    while True:
        held.append(bytearray(os.urandom(1024)) * (chunk // 1024))


def child_hog():
    subprocess.run([sys.executable, __file__, "hog"], check=True)


def memory_error():
    raise MemoryError("no room for it")


def print_much(lines):
    for number in range(lines):
        print("line", number)
        print("on stderr", number, file=sys.stderr)
    os.write(1, b"\xff\xfe{}\n")
    return lines


def close_all_files():
    os.closerange(0, 256)
    return "never seen"


def close_output():
    os.close(1)
    os.close(2)
    return "seen"


def close_pipes_and_stay():
    os.closerange(3, 256)
    time.sleep(600)


def write_to_all_files():
    for fd in range(3, 256):
        try:
            os.write(fd, b"what is this?\n")
        except OSError:
            continue


def replace_stdout():
    sys.stdout = None
    sys.stderr.close()
    return "seen"


def child_left_behind():
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid


def ask_each(ask, values):
    return [ask(value) for value in values]


def ask_from_threads(ask, count):
    found = []
    threads = [threading.Thread(target=lambda number=number: found.append(ask(number))) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(found)


def ask_in_a_child(ask):
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            ask(1)
        except RuntimeError as error:
            os.write(writer, str(error).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    return os.read(reader, 1000).decode()


def ask_then_hang(ask):
    ask(1)
    time.sleep(600)


def forked_child_then_die():
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
    print("child", pid)
    os._exit(3)


def fail():
    raise FileNotFoundError("no such model")


def interrupt():
    raise KeyboardInterrupt


def not_json():
    return {1, 2}


def long_answer(size):
    return "x" * size


def samples_of_work(calls, samples, size):
    result = []
    for _ in range(samples):
        start = time.perf_counter()
        for _ in range(calls):
            sum(range(size))
        result.append(time.perf_counter() - start)
    return result


runs = 0


def dies_later(calls, samples, after):
    global runs
    runs += 1
    if runs > after:
        segfault()
    return samples_of_work(calls, samples, size=10)


if __name__ == "__main__":
    globals()[sys.argv[1]]()


def cores():
    """Cores of this thread, of one that it starts, and of a process."""
    sched_getaffinities = [sorted(os.sched_getaffinity(0))]
    thread = threading.Thread(target=lambda: sched_getaffinities.append(sorted(os.sched_getaffinity(0))))
    thread.start()
    thread.join()
    program = "import os; print(*sorted(os.sched_getaffinity(0)))"
    text = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    return [*sched_getaffinities, list(map(int, text.split()))]
