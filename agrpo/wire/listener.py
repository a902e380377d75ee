"""Trainer rank 0's end of the wire: a reading and a writing thread."""

from __future__ import annotations

import hmac
import queue
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Any

from agrpo.wire.codec import HANDSHAKE_S, LENGTHS, Message, Start, WireError, check_sizes, decode, encode, proof

CLOSED = "the rollout process closed the connection"


class Listener:
    """Trainer rank 0's end: one authenticated connection, a thread that reads, `on_message` called in that thread."""

    def __init__(self, host: str, port: int, key: str, start: Callable[[], Start], on_message: Callable[[Any], None]):
        self._key, self._start, self._on_message = key, start, on_message
        self._socket = socket.create_server((host, port))
        self.port = self._socket.getsockname()[1]
        self._peer: socket.socket | None = None
        self._outgoing: queue.SimpleQueue[list[bytes | memoryview] | None] = queue.SimpleQueue()
        self.error: BaseException | None = None
        self.connected = threading.Event()
        self._closing = False
        self._reader = threading.Thread(target=self._run, name="wire-read", daemon=True)
        self._reader.start()

    def send(self, message: Message) -> None:
        """Queue a message for the rollout process; never blocks the training loop."""
        if self.connected.is_set():
            self._outgoing.put(encode(message))

    def close(self, flush_s: float = 5.0) -> None:
        """Send what is queued and read until the other end has closed: cut off in the middle of a message of its own, it
        would take a normal end for a failure."""
        self._closing = True
        self._outgoing.put(None)
        if self.connected.is_set():
            self._writer.join(flush_s)
            self._reader.join(flush_s)
        for end in (self._peer, self._socket):
            if end is not None:
                try:
                    end.shutdown(socket.SHUT_RDWR)  # wakes the reading thread, which close alone does not
                except OSError:
                    pass
                end.close()

    def _run(self) -> None:
        try:
            while self._peer is None:
                peer, _ = self._socket.accept()
                self._peer = self._authenticate(peer)
            # The start state is taken and queued before any other message can be: later counters are never older.
            self._outgoing.put(encode(self._start()))
            self._writer = threading.Thread(target=self._write, name="wire-write", daemon=True)
            self._writer.start()
            self.connected.set()
            while True:
                header_size, payload_size = LENGTHS.unpack(self._read(LENGTHS.size))
                check_sizes(header_size, payload_size)
                self._on_message(decode(bytes(self._read(header_size)), self._read(payload_size)))
        except BaseException as error:  # reported by the training loop at its next look, never lost
            if not self._closing:
                self.error = error

    def _authenticate(self, peer: socket.socket) -> socket.socket | None:
        peer.settimeout(HANDSHAKE_S)
        ours = secrets.token_bytes(32)
        try:
            peer.sendall(ours)
            answer = b""
            while len(answer) < 64:
                part = peer.recv(64 - len(answer))
                if not part:
                    raise ConnectionError("closed during the handshake")
                answer += part
            theirs, shown = answer[:32], answer[32:]
            if not hmac.compare_digest(shown, proof(self._key, b"rollout", ours, theirs)):
                raise ConnectionError("wrong key")
            peer.sendall(proof(self._key, b"trainer", theirs, ours))
        except OSError:
            peer.close()  # a stranger: keep listening for the rollout process
            return None
        peer.settimeout(None)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return peer

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        view, at = memoryview(data), 0
        while at < size:
            try:
                count = self._peer.recv_into(view[at:])
            except OSError as error:
                raise WireError(f"{CLOSED}: {error.strerror}") from error
            if count == 0:
                raise WireError(CLOSED)
            at += count
        return data

    def _write(self) -> None:
        while (buffers := self._outgoing.get()) is not None:
            try:
                for buffer in buffers:
                    self._peer.sendall(buffer)
            except OSError as error:
                if not self._closing and self.error is None:  # the reading thread may know more
                    self.error = WireError(f"{CLOSED}: {error.strerror}")
                return
