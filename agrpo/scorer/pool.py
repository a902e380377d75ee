"""The worker processes of synchronous reward functions, seen from the rollout process's event loop.

    acquire an idle worker -> send the group -> wait, at most the time limit -> release it
                                                 | too late, or the worker died: kill its process group, start another

A worker executes one (function, group) call at a time, so whoever waits for a worker waits at most one time limit per call
ahead of it. The pool starts small and grows to its bound while calls wait; each worker has `START_S` to import its functions.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from agrpo.errors import ContractError, StallError
from agrpo.scorer import guard
from agrpo.scorer.contract import ScoreError
from agrpo.scorer.entries import Entry
from agrpo.scorer.worker import REPLY, REQUEST

START_S = 120.0  # to start the interpreter and import the user's modules
START_TRIES = 3
GROW_AFTER_S = 0.2  # a call that waited this long for a worker starts another one
POLL_S = 0.5  # how often a silent worker is looked at: one that died can leave its channel open in a child
REAP_S = 5.0

# Reward code must not touch the accelerators of trainer and server (REW-12), and shares the cores with other workers.
HIDDEN_DEVICES = {name: "" for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")}
ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}


class WorkerDied(Exception):
    """The worker's process ended without an answer; the text says how."""


class Worker:
    """One process in its own process group, and the channel to it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._channel = ours
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "agrpo.scorer.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**ONE_THREAD, **os.environ, **HIDDEN_DEVICES, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        self.pid, self._killed = self._process.pid, False

    async def start(self, functions: list[tuple[str, Entry]]) -> None:
        """Wait until the functions are imported; ContractError if they cannot be, WorkerDied if the process ended."""
        try:
            self._reader, self._writer = await asyncio.open_connection(sock=self._channel)
            answer = await self.ask(0, pickle.dumps(functions), START_S)
        except TimeoutError as error:
            raise StallError(f"a scorer worker did not import its reward functions within {START_S:g} s") from error
        if answer[0] == "refused":
            raise ContractError(answer[1])

    async def ask(self, index: int, body: bytes, timeout_s: float | None) -> tuple[Any, ...]:
        """The worker's answer; TimeoutError or WorkerDied, after which only `kill` is allowed."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        exchange = asyncio.ensure_future(self._exchange(index, body))
        try:
            while not exchange.done():
                left = POLL_S if deadline is None else min(POLL_S, deadline - time.monotonic())
                if left <= 0:
                    raise TimeoutError
                done, _ = await asyncio.wait({exchange}, timeout=left)
                if not done and self._process.poll() is not None:
                    raise WorkerDied(self._ending())
            return await exchange
        except (asyncio.IncompleteReadError, OSError) as error:
            if isinstance(error, TimeoutError):
                raise
            await self._reap()
            raise WorkerDied(self._ending()) from error
        finally:
            exchange.cancel()

    async def _exchange(self, index: int, body: bytes) -> tuple[Any, ...]:
        self._writer.write(REQUEST.pack(len(body), index))
        self._writer.write(body)
        await self._writer.drain()
        (length,) = REPLY.unpack(await self._reader.readexactly(REPLY.size))
        return pickle.loads(await self._reader.readexactly(length))

    def _ending(self) -> str:
        code = self._process.poll()
        if code is None:
            return "it closed its channel"
        return f"killed by signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def kill(self) -> None:
        """Kill the process group, so that what the function started dies too; once, because the id may be used again."""
        if self._killed:
            return
        self._killed = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        if hasattr(self, "_writer"):
            self._writer.transport.abort()
        else:
            self._channel.close()

    async def _reap(self) -> None:
        deadline = time.monotonic() + REAP_S
        while self._process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.005)

    async def end(self) -> None:
        self.kill()
        await self._reap()


class Pool:
    """At most `bound` workers; `open` starts the first ones, `close` kills them all."""

    def __init__(self, functions: list[tuple[str, Entry]], initial: int, bound: int):
        self._functions, self._initial, self._bound = functions, min(initial, bound), bound
        self._workers: set[Worker] = set()  # alive or starting
        self._idle: list[Worker] = []  # last used first, so that surplus workers stay cold
        self._waiters: deque[asyncio.Future[Worker]] = deque()
        self._tasks: set[asyncio.Task] = set()
        self._fatal: Exception | None = None
        self._guard: subprocess.Popen | None = None

    @property
    def worker_pids(self) -> list[int]:
        return [w.pid for w in self._workers]

    async def open(self) -> None:
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(guard.__file__))],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True, text=True,
        )  # fmt: skip
        starts = (self._start_worker() for _ in range(self._initial))
        for fault in await asyncio.gather(*starts, return_exceptions=True):
            if isinstance(fault, BaseException):
                raise fault

    async def call(self, index: int, body: bytes, timeout_s: float | None) -> tuple[Any, ...]:
        """The answer to one call; ScoreError("timeout" or "died"), after which the worker has been replaced."""
        worker = await self._acquire()
        name = self._functions[index][0]
        try:
            answer = await worker.ask(index, body, timeout_s)
        except BaseException as error:
            self._replace(worker)
            if isinstance(error, TimeoutError):
                text = f"reward function {name} exceeded scorer.timeout={timeout_s:g} s; its worker was killed and replaced"
                raise ScoreError("timeout", text) from None
            if isinstance(error, WorkerDied):
                raise ScoreError(
                    "died", f"the worker of reward function {name} died: {error}; it was replaced"
                ) from None
            raise
        self._release(worker)
        return answer

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        workers, self._workers, self._idle = list(self._workers), set(), []
        await asyncio.gather(*(worker.end() for worker in workers))
        if self._guard is not None:
            for worker in workers:
                self._tell_guard("-", worker)
            with contextlib.suppress(BrokenPipeError):
                self._guard.stdin.close()  # type: ignore[union-attr]
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._guard.wait, REAP_S)

    async def _acquire(self) -> Worker:
        while not self._idle:
            if self._fatal is not None:
                raise self._fatal
            waiter: asyncio.Future[Worker] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                return await asyncio.wait_for(waiter, GROW_AFTER_S)
            except TimeoutError:
                self._grow()
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():
                    self._release(waiter.result())
                raise
        return self._idle.pop()

    def _release(self, worker: Worker) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(worker)
                return
        self._idle.append(worker)

    def _replace(self, worker: Worker) -> None:
        self._workers.discard(worker)
        worker.kill()
        self._in_background(self._end_worker(worker))
        self._grow()

    def _grow(self) -> None:
        if len(self._workers) < self._bound and self._fatal is None:
            self._in_background(self._start_worker())

    def _in_background(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task) -> None:
        """A worker that cannot be started again ends the run: every waiting and later call gets its error."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fatal = error  # type: ignore[assignment]

    async def _start_worker(self) -> None:
        """Start one worker; one that dies while it imports is tried again, for it may have been killed from outside."""
        for attempt in range(1, START_TRIES + 1):
            try:
                return await self._try_start()
            except WorkerDied as error:
                if attempt == START_TRIES:
                    text = f"{START_TRIES} scorer workers died while importing the reward functions, the last: {error}"
                    raise ContractError(text) from error

    async def _try_start(self) -> None:
        worker = Worker()
        self._workers.add(worker)
        self._tell_guard("+", worker)
        try:
            await worker.start(self._functions)
        except BaseException:
            self._workers.discard(worker)
            await self._end_worker(worker)
            raise
        self._release(worker)

    async def _end_worker(self, worker: Worker) -> None:
        await worker.end()
        self._tell_guard("-", worker)

    def _tell_guard(self, sign: str, worker: Worker) -> None:
        with contextlib.suppress(OSError, ValueError):  # a lost guard only loses the protection it adds
            self._guard.stdin.write(f"{sign}{worker.pid}\n")  # type: ignore[union-attr]
            self._guard.stdin.flush()  # type: ignore[union-attr]
