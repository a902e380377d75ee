"""The channel between the rollout process and trainer rank 0: strangers, silence, rubbish, and ends that go away."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from agrpo import wire
from agrpo.wire import link as rollout_end
from agrpo.wire import listener as trainer_end
from tests.faults.table import Fault

KEY = "cd" * 32
START = wire.Start(0, 1, [], [], 0, 0, 1000)
SHORT_S = 0.5  # for what the handshake may take, instead of half a minute


def connect(port: int, key: str = KEY) -> None:
    async def work() -> None:
        link = await wire.connect("127.0.0.1", port, key, 0.5)
        await link.receive()

    asyncio.run(work())


def peer(does: str, folder: Path) -> None:
    """What listens at the trainer's port is no trainer, or one that dies."""
    with socket.create_server(("127.0.0.1", 0)) as server, _short_handshake():
        port = server.getsockname()[1]

        def serve() -> None:
            end, _ = server.accept()
            if does == "closes":
                end.close()
            elif does == "dies in the handshake":
                end.sendall(secrets.token_bytes(32))
                end.recv(64)
                end.close()
            elif does == "is another program":
                end.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(64))
                time.sleep(1)
            else:
                time.sleep(2 * SHORT_S)  # silent

        threading.Thread(target=serve, daemon=True).start()
        connect(port)


def nobody(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    connect(port)


def stranger(does: str, folder: Path) -> str:
    """Somebody else connects to the trainer first; the rollout process must still get through."""
    with _short_handshake(), _listening([]) as end:
        with socket.create_connection(("127.0.0.1", end.port)) as other:
            if does == "sends rubbish":
                other.sendall(bytes(200))
            else:
                time.sleep(0.1)
            found: list[str] = []

            async def work() -> None:
                link = await wire.connect("127.0.0.1", end.port, KEY, 10)
                found.append(f"the rollout process connects, {link.start.limit_tokens} tokens")
                await link.close()

            asyncio.run(work())
        return found[0]


def rubbish(data: bytes, folder: Path) -> None:
    """A peer that knows the key sends what is no message."""
    with _listening([]) as end:

        async def work() -> None:
            link = await wire.connect("127.0.0.1", end.port, KEY, 10)
            link._writer.write(data)
            await link._writer.drain()
            while end.error is None:
                await asyncio.sleep(0.01)
            await link.close()

        asyncio.run(work())
        if isinstance(end.error, wire.WireError):
            raise end.error
        raise wire.WireError(f"{type(end.error).__name__}: {end.error}")


def trainer_goes(folder: Path) -> None:
    """Its process is gone in the middle of the run: the kernel closes the connection."""
    with _listening([]) as end:

        async def work() -> None:
            link = await wire.connect("127.0.0.1", end.port, KEY, 10)
            end._peer.shutdown(socket.SHUT_RDWR)
            async for _ in link.incoming():
                pass

        asyncio.run(work())


@contextlib.contextmanager
def _short_handshake() -> Iterator[None]:
    before = rollout_end.HANDSHAKE_S
    rollout_end.HANDSHAKE_S = trainer_end.HANDSHAKE_S = SHORT_S
    try:
        yield
    finally:
        rollout_end.HANDSHAKE_S = trainer_end.HANDSHAKE_S = before


@contextlib.contextmanager
def _listening(seen: list) -> Iterator[wire.Listener]:
    end = wire.Listener("127.0.0.1", 0, KEY, lambda: START, seen.append)
    try:
        yield end
    finally:
        end.close(0.1)


THROUGH = "the rollout process connects, 1000 tokens"
FAULTS = [
    Fault("wire", "nobody listens", "exit code 6", nobody, "waited 0 s for the trainer to listen"),
    *(Fault("wire", f"the listener {does}", "exit code 1", partial(peer, does), says) for does, says in (
        ("closes", "closed the connection before the run began"),
        ("dies in the handshake", "closed the connection before the run began"),
        ("is another program", "does not know the key"),
        ("says nothing", "gave no answer in"),
    )),
    *(Fault("wire", f"a stranger {does}", THROUGH, partial(stranger, does)) for does in ("sends rubbish", "says nothing")),
    Fault("wire", "a frame of 2^60 bytes", "exit code 1", partial(rubbish, struct.pack("<IQ", 16, 1 << 60)), "bytes"),
    Fault("wire", "a header that is no message", "exit code 1", partial(rubbish, struct.pack("<IQ", 3, 0) + b"\xc1\xc1\xc1")),
    Fault("wire", "the trainer goes away", "exit code 1", trainer_goes, "the trainer closed the connection"),
]  # fmt: skip
