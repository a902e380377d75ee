"""The event loop that agents run on, in a thread of its own, with the HTTP client they share."""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import importlib.util
import re
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

from agrpo.errors import AgrpoError, RolloutFailure

_ANSWERS_WITHIN_S, _ENDS_WITHIN_S = 1.0, 5.0


class AgentLoop:
    """`run` an agent's coroutine there and await it here."""

    def __init__(self) -> None:
        self.http_client: Any = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._live, name="agents", daemon=True)

    def _live(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def start(self) -> None:
        self._thread.start()
        self.http_client = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_client(), self._loop))

    async def close(self) -> None:
        """Cancel what still runs and end the thread; an agent that does not let go of it is left to the process's end."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._clear(), self._loop)
            await asyncio.to_thread(self._thread.join, _ENDS_WITHIN_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def _clear(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_ANSWERS_WITHIN_S)
        if self.http_client is not None:
            await self.http_client.aclose()
        self._loop.stop()

    async def run(self, start: Callable[[], Awaitable[Any]]) -> Any:
        """The result of `await start()` there; cancelling this cancels it. The caller's context variables go along."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_guarded(start), self._loop))

    async def blocked_text(self) -> str:
        """Where the loop is stuck, as the end of a sentence; empty if it turns."""
        turned = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop))
        try:
            async with asyncio.timeout(_ANSWERS_WITHIN_S):
                await turned
            return ""
        except TimeoutError:
            frame = sys._current_frames().get(self._thread.ident)
            at = traceback.extract_stack(frame)[-1]
            where = f"{at.filename}:{at.lineno} in {at.name}"
            return f"; it blocks the event loop at {where}: use await, or await asyncio.to_thread(function)"


async def _guarded(start: Callable[[], Awaitable[Any]]) -> Any:
    """What an agent raises as an Exception: a cancellation of its own, or an exit, must end nothing but its rollout."""
    try:
        return await start()
    except (Exception, AgrpoError):
        raise
    except asyncio.CancelledError:
        if asyncio.current_task().cancelling():
            raise
        raise RolloutFailure("error", "the agent cancelled itself") from None
    except BaseException as error:
        raise RolloutFailure("error", f"the agent raised {type(error).__name__}: {error}") from None


async def _client() -> Any:
    """An HTTP client of the kind that the installed `openai` package takes; it never goes through a proxy."""
    module = importlib.import_module(_http_module())
    return module.AsyncClient(timeout=None, trust_env=False, limits=module.Limits(max_connections=None))


def _http_module() -> str:
    try:
        needed = {re.split(r"[^\w-]", line)[0] for line in importlib.metadata.requires("openai") or ()}
    except importlib.metadata.PackageNotFoundError:
        needed = {"httpx2", "httpx"}
    return next(name for name in ("httpx2", "httpx") if name in needed and importlib.util.find_spec(name))
