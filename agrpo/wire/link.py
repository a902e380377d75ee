"""The rollout process's end of the wire (asyncio)."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from agrpo.errors import StallError
from agrpo.types import ReadyGroup
from agrpo.wire.codec import (
    HANDSHAKE_S,
    LENGTHS,
    EvalResult,
    Finish,
    LoopState,
    Message,
    Metrics,
    Resolved,
    Start,
    WireError,
    check_sizes,
    decode,
    encode,
    proof,
)


class Link:
    """One authenticated connection; `start` is where the run stands."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer, self._lock = reader, writer, asyncio.Lock()
        self.start: Start

    async def send_ready(self, group: ReadyGroup) -> None:
        await self._send(encode(group))

    async def send_resolved(self, group_id: int, reason: str) -> None:
        await self._send(encode(Resolved(group_id, reason)))

    async def send_metrics(self, window: dict[str, Any]) -> None:
        await self._send(encode(Metrics(window)))

    async def send_eval(self, name: str, result: dict[str, float]) -> None:
        await self._send(encode(EvalResult(name, result)))

    async def send_loop_state(self, state: bytes | None) -> None:
        await self._send(encode(LoopState(state)))

    async def _send(self, buffers: list[bytes | memoryview]) -> None:
        async with self._lock:
            try:
                self._writer.writelines(buffers)
                await self._writer.drain()
            except ConnectionError as error:
                raise WireError("the trainer closed the connection") from error

    async def receive(self) -> Message:
        """The next message of the trainer; WireError when it has gone."""
        try:
            header_size, payload_size = LENGTHS.unpack(await self._reader.readexactly(LENGTHS.size))
            check_sizes(header_size, payload_size)
            header = await self._reader.readexactly(header_size)
            payload = await self._reader.readexactly(payload_size)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise WireError("the trainer closed the connection") from error
        return decode(header, payload)

    async def incoming(self) -> AsyncIterator[Message]:
        """Messages until `Finish`, which is yielded too; WireError when the trainer goes without one."""
        while True:
            message = await self.receive()
            yield message
            if isinstance(message, Finish):
                return

    async def close(self) -> None:
        self._writer.close()
        try:
            await asyncio.wait_for(self._writer.wait_closed(), 2.0)
        except (TimeoutError, ConnectionError):
            pass


async def connect(host: str, port: int | Callable[[], int | None], key: str, timeout_s: float = 1800.0) -> Link:
    """Connect to trainer rank 0, retrying until it listens; StallError after `timeout_s` seconds.

    `port` may be asked for again and again: None until it is known.
    """
    deadline, refused = time.monotonic() + timeout_s, None
    while True:
        number = port if isinstance(port, int) else port()
        try:
            if number is not None:
                reader, writer = await asyncio.open_connection(host, number, limit=1 << 22)
                break
        except OSError as error:
            refused = error
        if time.monotonic() > deadline:
            place = f"{host}:{number}" if number else host
            raise StallError(f"waited {timeout_s:.0f} s for the trainer to listen on {place}") from refused
        await asyncio.sleep(0.1)
    link = Link(reader, writer)
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            link.start = await _start(link, reader, writer, key)
    except (asyncio.IncompleteReadError, ConnectionError, TimeoutError) as error:
        writer.close()
        how = f"gave no answer in {HANDSHAKE_S:g} s" if isinstance(error, TimeoutError) else "closed the connection"
        raise WireError(f"the trainer at {host}:{number} {how} before the run began") from error
    except BaseException:
        writer.close()
        raise
    return link


async def _start(link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: str) -> Start:
    """Both ends show that they know the key; the trainer says first where the run stands."""
    theirs, ours = await reader.readexactly(32), secrets.token_bytes(32)
    writer.write(ours + proof(key, b"rollout", theirs, ours))
    if not hmac.compare_digest(await reader.readexactly(32), proof(key, b"trainer", ours, theirs)):
        raise WireError("what listens there does not know the key of this run")
    start = await link.receive()
    if not isinstance(start, Start):
        raise WireError(f"expected the start state, got {type(start).__name__}")
    return start
