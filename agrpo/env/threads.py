"""Threads for the user's synchronous code: kept for the next call, given up where a call never returns.

A hung call keeps its own thread and nothing else: no other call waits for it, and neither does the end of the process.
"""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any


class Threads:
    """`await threads.run(function, ...)`: a coroutine function is awaited, any other call runs in a thread of its own.

    There are as many threads as calls were in flight at once, at most `rollout.max_concurrent_rollouts` and those hung.
    """

    def __init__(self) -> None:
        self._idle: list[_Thread] = []
        self._is_closed = False

    async def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """What the function returns, or raises. A cancelled call in a thread goes on, and its result is dropped."""
        return await self.timed(function, args, kwargs, [])

    async def timed(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], seconds: list[float]
    ) -> Any:
        """The same; the time spent in the function itself, not in waiting for this event loop, is added to `seconds`."""
        if inspect.iscoroutinefunction(function):
            began = time.monotonic()
            try:
                return await function(*args, **kwargs)
            finally:
                seconds.append(time.monotonic() - began)

        def call() -> Any:
            began = time.monotonic()
            try:
                return function(*args, **kwargs)
            finally:
                seconds.append(time.monotonic() - began)

        thread = self._idle.pop() if self._idle else _Thread()
        result = await thread.run(call, self._take_back)
        return await result if inspect.isawaitable(result) else result

    def _take_back(self, thread: _Thread) -> None:
        if self._is_closed:
            thread.stop()
        else:
            self._idle.append(thread)

    def close(self) -> None:
        """End the threads without work; one whose call never returns ends with the process."""
        self._is_closed = True
        while self._idle:
            self._idle.pop().stop()


class _Thread:
    """One thread and the calls it is given, one at a time."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="agrpo-env", daemon=True).start()

    def run(self, function: Callable[[], Any], when_done: Callable[[_Thread], None]) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        future = loop.create_future()

        def finish(result: Any, error: BaseException | None) -> None:
            when_done(self)
            if future.cancelled():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        def call() -> None:
            result, error = None, None
            try:
                result = function()
            except StopIteration as stop:  # a future cannot hold it
                error = RuntimeError(f"StopIteration: {stop}")
            except BaseException as raised:  # also SystemExit: a tool that calls exit() ends its call, not the run
                error = raised if isinstance(raised, Exception) else RuntimeError(f"{type(raised).__name__}: {raised}")
            if not loop.is_closed():
                loop.call_soon_threadsafe(finish, result, error)

        self._calls.put(call)
        return future

    def stop(self) -> None:
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except RuntimeError:  # the event loop ended between the question and the call
                return
