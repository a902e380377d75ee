"""Starts Python processes from one that has PyTorch and Transformers in memory: importing them is nine tenths of the
processor time of a short run, and the tests make a hundred of those.

`install()` puts `WarmPopen` in the place of `subprocess.Popen`. `python -m agrpo...` is then forked from a nursery: a
process that has imported LIBRARIES, nothing of agrpo, has one thread and does nothing. What comes out has its own pid, its
true parent, arguments, environment, folder, session, files and signals, and runs the module from the start, as a new
interpreter would. A supervisor's children, each with its leash, come from the supervisor's own nursery. Whatever is
asked for in another way, or with variables that are read while importing, is started as ever; so is everything with
`AGRPO_TESTS_COLD=1`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from subprocess import Popen

import setproctitle

LIBRARIES = (
    "torch", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "torch.distributed.checkpoint.stateful",
    "transformers", "transformers.models.qwen3.modeling_qwen3", "transformers.models.auto.tokenization_auto",
    "transformers.models.auto.modeling_auto", "transformers.optimization", "peft", "tokenizers", "safetensors.torch", "numpy",
    "hydra", "omegaconf", "typer", "aiohttp.web", "msgspec", "rich.console", "pydantic",
)  # fmt: skip
ROOT = Path(__file__).parents[1]
LEASH = ["-I", "-S", str(ROOT / "agrpo" / "launch" / "leash.py")]
OF_A_RUN = ("agrpo.train", "agrpo.rollout", "agrpo.serve.embedded")  # end by themselves, with all that may go wrong then
STARTING = ("agrpo", str(ROOT / "tests/launch/supervise_scripted.py"))  # start others in turn
# Variables that may differ from the nursery's: read when they are used, not while one of LIBRARIES is imported.
FREE = ("AGRPO_", "PYTEST_", "MASTER_", "GLOO_", "XDG_", "PATH", "PYTHONPATH", "PYTHONUNBUFFERED", "TOKENIZERS_PARALLELISM")
FREE += ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "COLUMNS", "LINES", "TERM", "NO_COLOR", "HYDRA_FULL_ERROR")
FREE += ("HTTP_PROXY", "http_proxy", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "MKL_NUM_THREADS", "TORCHINDUCTOR_", "WANDB_")
FREE += ("OLDPWD", "PWD", "_")
PR_SET_CHILD_SUBREAPER = 36
LONGEST_REQUEST = 1 << 18  # bytes
_prctl = getattr(ctypes.CDLL(None), "prctl", None)  # of Linux


class _Become(BaseException):
    """Unwinds a forked process to the bottom of its stack, where it turns into what was asked for."""

    def __init__(self, command: list[str]):
        self.command = command


class Nursery:
    """The asking end; a process that holds one forks from it by `start`."""

    def __init__(self, channel: socket.socket, variables: dict[str, str]):
        self.channel, self.variables, self.lock = channel, variables, threading.Lock()

    @classmethod
    def open(cls) -> Nursery:
        """A new one, whose libraries are imported while this process goes on."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**usual, "PYTHONPATH": str(ROOT)}
        with theirs:
            command = [sys.executable, "-m", "tests.warm", str(theirs.fileno())]
            Popen(command, pass_fds=[theirs.fileno()], env=environment, cwd=ROOT, stdin=subprocess.DEVNULL)
        return cls(ours, usual)

    def fits(self, variables: dict[str, str]) -> bool:
        differing = {k for k in {*variables, *self.variables} if variables.get(k) != self.variables.get(k)}
        return all(name.startswith(FREE) for name in differing)

    def start(self, command: list[str], variables: dict[str, str], cwd: str, files: list[int], new_session: bool) -> int:
        """Pid of the new process, a child of this one as any other."""
        request = {"command": command, "environment": variables, "cwd": cwd, "new_session": new_session, "parent": os.getpid()}
        with self.lock:
            _prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self.channel, [json.dumps(request).encode()], files)
                answer = self.channel.recv(64)
            finally:
                _prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        if not answer:
            raise RuntimeError("the nursery is gone")
        return int(answer)


nursery: Nursery | None = None  # this process's own
opening = threading.Lock()
usual: dict[str, str] = {}  # the environment before any test changed it
is_leash = False


class WarmPopen(Popen):
    """`subprocess.Popen` that forks where that gives the same process."""

    def _execute_child(
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *others,
    ):  # fmt: skip
        start_new_session, process_group = others[-2:]
        files = [given if given != -1 else usual for usual, given in enumerate((p2cread, c2pwrite, errwrite))]
        variables = dict(os.environ if env is None else env)
        plain = not (executable or shell or pass_fds) and process_group == -1 and isinstance(args, list | tuple)
        words = [str(word) for word in args] if plain else []
        if is_leash and words[:1] == [sys.executable] and _is_known(words[1:]):
            self.pid = self._fork(words, preexec_fn)
        elif plain and preexec_fn is None and _can_be_forked(words) and (home := _home()).fits(variables):
            self.pid = home.start(words[1:], variables, str(cwd or os.getcwd()), files, bool(start_new_session))
        else:
            super()._execute_child(
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
                p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *others,
            )  # fmt: skip
            return
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    def _fork(self, words: list[str], preexec_fn) -> int:
        """A leash has one thread and is as fresh as what it starts."""
        pid = os.fork()
        if pid:
            return pid
        self._child_created = False  # nothing to wait for when this object goes
        if preexec_fn is not None:
            preexec_fn()
        as_new_interpreter()
        raise _Become(words[1:])


def _can_be_forked(words: list[str]) -> bool:
    if words[:1] != [sys.executable]:
        return False
    if words[1:4] == LEASH:
        return words[4:5] == [sys.executable] and _is_known(words[5:])
    return _is_known(words[1:])


def _is_known(command: list[str]) -> bool:
    """Whether it is code of agrpo or of its tests that is worth a fork: a reward's worker imports next to nothing."""
    if command[:1] == ["-m"]:
        return command[1] in (*OF_A_RUN, *STARTING, "agrpo.launch.doctor_child") or command[1].startswith("tests.")
    return bool(command) and command[0].startswith(str(ROOT / "tests")) and command[0].endswith(".py")


def _home() -> Nursery:
    global nursery
    with opening:
        if nursery is None:
            nursery = Nursery.open()
        return nursery


def install() -> None:
    usual.update(os.environ)
    if sys.platform.startswith("linux") and not os.environ.get("AGRPO_TESTS_COLD"):
        subprocess.Popen = WarmPopen


def serve(channel: socket.socket) -> list[str]:
    """The nursery's loop until nobody can ask any more; returns in each new process, with the words after `python`."""
    while True:
        data, files, _, _ = socket.recv_fds(channel, LONGEST_REQUEST, 3)
        if not data:
            os._exit(0)
        between = os.fork()
        if between == 0:
            if os.fork():
                os._exit(0)
            return _born(json.loads(data), files, channel)
        for file in files:
            os.close(file)
        os.waitpid(between, 0)


def _born(request: dict, files: list[int], channel: socket.socket) -> list[str]:
    """Whoever asked is the parent as soon as the process between is gone, and is told so."""
    while os.getppid() != request["parent"]:
        time.sleep(0.0005)
    channel.send(str(os.getpid()).encode())
    channel.detach()  # its number is free for another file now
    if request["new_session"]:
        os.setsid()
    os.chdir(request["cwd"])
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.closerange(3, 256)
    os.environ.clear()
    os.environ.update(request["environment"])
    as_new_interpreter()
    return request["command"]


def as_new_interpreter() -> None:
    """What `exec` and the start of Python do to signals and to the three files."""
    for number in signal.valid_signals():
        with contextlib.suppress(OSError, ValueError):
            if signal.getsignal(number) not in (signal.SIG_IGN, signal.SIG_DFL, None):
                signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    kept.append((sys.stdin, sys.stdout, sys.stderr))  # not closed: their numbers are in use again
    sys.stdin = sys.__stdin__ = open(0, closefd=False)
    sys.stdout = sys.__stdout__ = _output(1, "strict")
    sys.stderr = sys.__stderr__ = _output(2, "backslashreplace")


def _output(number: int, errors: str) -> io.TextIOWrapper:
    at_once = bool(os.environ.get("PYTHONUNBUFFERED"))
    file = open(number, "wb", buffering=0 if at_once else -1, closefd=False)
    by_line = number == 2 or os.isatty(number)
    return io.TextIOWrapper(file, errors=errors, line_buffering=by_line, write_through=at_once)


kept: list = []


def turn_into(command: list[str]) -> None:
    """Run what `python *command` would run, with its name in the list of processes."""
    global nursery, is_leash
    setproctitle.setproctitle(" ".join([sys.executable, *command]))
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [os.getcwd(), *paths, *installed]
    importlib.invalidate_caches()
    nursery, is_leash = None, command[:3] == LEASH
    if is_leash:
        command = command[2:]
    is_module = command[0] == "-m"
    name = command[is_module]
    if not is_module:
        sys.path[0] = str(Path(name).parent)
    if name in STARTING:
        nursery = _branch()
    if is_leash or nursery is not None:
        install()
    sys.argv = [name, *command[1 + is_module :]]
    try:
        if is_module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(name, run_name="__main__")
    except SystemExit as end:
        if name in OF_A_RUN:
            raise
        _leave(end.code)


def _leave(code: object) -> None:
    """The end of a process that by itself would have none of LIBRARIES: taking them apart takes half a second."""
    if code is None or isinstance(code, int):
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)
    raise SystemExit(code)


def _branch() -> Nursery:
    """A nursery of this process's own, forked from it before it has done anything."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    variables = dict(os.environ)
    if os.fork():
        theirs.close()
        return Nursery(ours, variables)
    ours.close()
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    os.setsid()
    setproctitle.setproctitle("nursery")
    raise _Become(serve(theirs))


installed: list[str] = []  # folders of the interpreter and its packages

if __name__ == "__main__":
    setproctitle.setproctitle("nursery")  # looks for its place now, before the environment moves
    gc.disable()
    for name in LIBRARIES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    gc.enable()
    installed = [path for path in sys.path[1:] if path != str(ROOT)]
    command = serve(socket.socket(fileno=int(sys.argv[1])))
    while True:
        try:
            turn_into(command)
            break
        except _Become as become:
            command = become.command
