"""Starts servers, engines and ranks as forks of a process that has imported torch: 2 to 3 s of each start.

`install` replaces how `subprocess.Popen` starts `python -m MODULE` of MODULES and SCRIPT. A process P has a
template T(P), a child with the imports done and one thread. T(P) forks the child C and a process between, which
ends at once, so the kernel gives C to P as its own child. C has its template T(C) before it has any thread, as
it starts processes too. All that exec would set is set: descriptors, signals, limits, environment, folder,
arguments (in /proc as well). A command that differs in what is read at imports is started by exec.
"""
from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import re
import resource
import runpy
import signal
import socket
import subprocess
import sys
import threading
import warnings

RANK = "penstock.exec.pipeline.process"                    # starts no other
MODULES = ("penstock.cli.main", "penstock.engine.process", RANK)
SCRIPT = re.compile(r"/(examples|e2e)/\w+\.py$")
IMPORTED = (*MODULES, "penstock.api.server", "penstock.exec.start.build", "penstock.engine.loop",
            "penstock.engine.pd.open", "penstock.engine.storing", "penstock.text.grammar.vocabulary")
READ_AT_IMPORTS = ("PYTHON", "OMP_", "GOMP_", "KMP_", "MKL_", "ATEN_", "ONEDNN_", "LD_", "MALLOC_", "CUDA_", "TORCH",
                   "TRITON_", "TOKENIZERS_", "HF_")
AT_FIRST_PRODUCT = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
WAITS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
LIMITS = tuple(getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_"))
PYTHON_IGNORES = (signal.SIGPIPE, signal.SIGXFSZ)
SUBREAPER = 36
MOST_FDS, HIGH = 250, 4096
ROOM = 2000                         # bytes in /proc/PID/cmdline for a child's own arguments

_by_exec = subprocess.Popen._execute_child
_lock = threading.Lock()
_template: socket.socket | None = None
environ: dict[str, str] = {}                # of this process when `install` was called
_imported_with: dict[str, str] = {}
on = True
forks = 0                           # that this process has started


def read_at_imports(env: dict[str, str]) -> dict[str, str]:
    """As a template has it, whose imports are behind `machine.bound_waits`."""
    found = {name: value for name, value in env.items()
             if name.startswith(READ_AT_IMPORTS) and name != AT_FIRST_PRODUCT}
    if not found.keys() & {*WAITS}:
        from penstock.config.base import machine
        found |= {"GOMP_SPINCOUNT": str(machine.SPINS), "KMP_BLOCKTIME": str(machine.BLOCK_MS)}
    return found


def install() -> None:
    """In a test process: the template is started by the first start that can use it.

    Starts with other values of READ_AT_IMPORTS than this process has now go by exec.
    """
    global environ, _imported_with
    environ = {**os.environ}
    _imported_with = read_at_imports(environ)
    subprocess.Popen._execute_child = _execute_child


def _program(args: object) -> tuple[str, list[str]] | None:
    """Module or script, and arguments, of a command that can be a fork, else None."""
    if not isinstance(args, list) or args[:1] != [sys.executable]:
        return None
    words = [str(word) for word in args[1:]]
    if words[:1] == ["-P"]:
        words = words[1:]
    if words[:1] == ["-m"] and words[1:2] and words[1] in MODULES:
        return words[1], words[2:]
    return (words[0], words[1:]) if words and SCRIPT.search(words[0]) else None


def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags,
                   shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, *rest):
    global forks
    wanted = {**os.environ} if env is None else {**env}
    found = _program(args)
    plain = preexec_fn is None and close_fds and not shell and executable in (None, sys.executable) and not any(
        value not in (None, -1, False) for value in rest)
    if not on or found is None or not plain or not _prepared(wanted):
        return _by_exec(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo,
                        creationflags, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite,
                        restore_signals, *rest)
    assert found is not None and _template is not None
    fds = {fd: fd for fd in pass_fds}
    fds |= {at: at if own == -1 else own for at, own in enumerate((p2cread, c2pwrite, errwrite))}
    order = {"program": found[0], "args": found[1], "argv": [str(word) for word in args], "env": wanted,
             "cwd": os.fspath(cwd) if cwd is not None else os.getcwd(), "fds": list(fds),
             "ignored": [number for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN
                         and number not in PYTHON_IGNORES],
             "limits": [resource.getrlimit(limit) for limit in LIMITS],
             "cores": sorted(os.sched_getaffinity(0))}
    libc = ctypes.CDLL(None)
    with _lock:
        libc.prctl(SUBREAPER, 1, 0, 0, 0)
        try:
            data = json.dumps(order).encode()
            socket.send_fds(_template, [len(data).to_bytes(4, "big")], list(fds.values()))
            _template.sendall(data)
            self.pid = int.from_bytes(_exactly(_template, 4), "big")
        finally:
            libc.prctl(SUBREAPER, 0, 0, 0, 0)
    forks += 1
    self._child_created = True
    self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def _prepared(env: dict[str, str]) -> bool:
    """Is there a template for a child with this environment? The first is started by exec."""
    global _template
    if read_at_imports(env) != _imported_with:
        return False
    with _lock:
        if _template is None and not _started:
            ours, theirs = socket.socketpair()
            with theirs:
                _started.append(subprocess.Popen([sys.executable, "-P", __file__, str(theirs.fileno()), " " * ROOM],
                                                 pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
                                                 stdout=subprocess.DEVNULL, env=env))
            # A process that cannot be one, for instance with a thread of OpenBLAS, has said so and ended.
            _template = ours if ours.recv(1) else None
    return _template is not None


_started: list[subprocess.Popen[bytes]] = []        # not collected: it ends with this process


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise ConnectionError("the template has ended")
        data += part
    return bytes(data)


def serve(sock: socket.socket) -> None:
    """The template: until its process has ended. Returns in each child, which then runs its module."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    while True:
        size, fds, _, _ = socket.recv_fds(sock, 4, MOST_FDS)
        if not size:
            os._exit(0)
        order = json.loads(_exactly(sock, int.from_bytes(size + _exactly(sock, 4 - len(size)), "big")))
        read, write = os.pipe()
        between = os.fork()
        if not between:
            child = os.fork()
            if child:
                os.write(write, child.to_bytes(4, "big"))
                os._exit(0)
            sock.detach()                       # its number may be one of the child's
            become(order, fds)
            return
        os.close(write)
        for fd in fds:
            os.close(fd)
        os.waitpid(between, 0)
        with contextlib.suppress(OSError):
            sock.sendall(os.read(read, 4))
        os.close(read)


def become(order: dict, fds: list[int]) -> None:
    """This process, a fork, gets what exec would have given it."""
    import fcntl
    global ORDER, _template, _imported_with
    ORDER = order
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, HIGH) for fd in fds]
    os.closerange(3, HIGH)
    for fd, at in zip(high, order["fds"], strict=True):
        os.dup2(fd, at)
        os.close(fd)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    for number in (*PYTHON_IGNORES, *order["ignored"]):
        signal.signal(number, signal.SIG_IGN)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    sys.argv = [order["program"], *order["args"]]
    sys.orig_argv = order["argv"]
    if order["program"] != RANK:
        ours, theirs = socket.socketpair()
        if not os.fork():
            ours.close()
            for fd in (set(order["fds"]) | {0, 1, 2}) - {2, theirs.fileno()}:
                with contextlib.suppress(OSError):
                    os.close(fd)
            null = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(null, fd)
            serve(theirs)
            return
        theirs.close()
        _template, _imported_with = ours, read_at_imports(order["env"])
        install()
    else:
        subprocess.Popen._execute_child = _by_exec
    for limit, values in zip(LIMITS, order["limits"], strict=True):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(limit, values)
    os.sched_setaffinity(0, order["cores"])
    _shown_as(order["argv"])


def _shown_as(argv: list[str]) -> None:
    """In /proc/self/cmdline."""
    start, end = map(int, open("/proc/self/stat").read().rsplit(")", 1)[1].split()[45:47])
    words = "\0".join(argv).encode()[:end - start - 1]
    ctypes.memmove(start, words.ljust(end - start, b"\0"), end - start)


ORDER: dict = {}


def main(fd: int) -> None:
    from penstock.config.base import machine
    machine.bound_waits()
    for name in IMPORTED:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a thread has started: a fork would not have it"
    gc.collect()
    gc.freeze()
    sock = socket.socket(fileno=fd)
    sock.sendall(b"!")
    serve(sock)
    code = 0
    try:
        if ORDER["program"] not in MODULES:
            sys.path.insert(0, os.path.dirname(ORDER["program"]))
            runpy.run_path(ORDER["program"], run_name="__main__")
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)         # the module is imported already
                runpy.run_module(ORDER["program"], run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code
        if not isinstance(code, int | None):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    _end(code or 0)


def _end(code: int) -> None:
    """As the interpreter ends, but for freeing what it has imported: .7 s of processor time."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 255)


if __name__ == "__main__":
    sys.modules["preloaded"] = sys.modules["__main__"]
    main(int(sys.argv[1]))
