"""The channel between the rollout process and trainer rank 0: authenticated, framed, arrays as buffers, no pickle.

    rollout  -- Ready, Resolved, Metrics, EvalResult -->  trainer rank 0 (listens)
    rollout  <-- Start, VersionUpdate, Credit, RunEval, Finish --  trainer rank 0

Both ends prove they know the run's key (HMAC over two nonces) before the first frame. A frame is
`u32 header length, u64 payload length, header (MessagePack), payload (array buffers back to back)`.
Order is kept in each direction; what is held is bounded by the admission credit (STA-4), not by the channel.
"""

from __future__ import annotations

import asyncio
import hmac
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import numpy as np

from agrpo.errors import AgrpoError, StallError
from agrpo.types import Ragged, ReadyGroup, Sample

_LENGTHS = struct.Struct("<IQ")
_MAX_HEADER, _MAX_PAYLOAD = 1 << 26, 1 << 33
_HANDSHAKE_S = 30.0


class WireError(AgrpoError):
    """The channel broke or the other end is not who it says."""


class Start(msgspec.Struct, tag=True, frozen=True):
    """First message to the rollout process: where the run stands (RES-4, RES-13)."""

    step: int  # optimizer steps done
    version: int  # weight version the server holds now
    resolved: list[tuple[int, int]]  # half-open intervals of resolved group ids
    ready: list[int]  # group ids the trainer already holds samples of
    taken_tokens: int
    pulled_tokens: int
    limit_tokens: int


class VersionUpdate(msgspec.Struct, tag=True, frozen=True):
    """The server serves this version from now on (SYNC-3)."""

    version: int


class Credit(msgspec.Struct, tag=True, frozen=True):
    """Admission counters, all absolute since this process started, in raw forwarded tokens (STA-4, STA-5)."""

    taken_tokens: int  # left the trainer's queue: trained, stale or oversize
    pulled_tokens: int  # seen by the planner, including samples of a step that is still open
    limit_tokens: int  # what may be held: queued or in flight
    gate_closed: bool = False  # STA-14: no group starts until the next sync is complete


class RunEval(msgspec.Struct, tag=True, frozen=True):
    """Run every evaluation that is due at the end of the run."""

    version: int


class Finish(msgspec.Struct, tag=True, frozen=True):
    """The run is over: stop, close, exit."""


class Resolved(msgspec.Struct, tag=True, frozen=True):
    """A group that needs no more work and brought no sample (ADV-7, GEN-14)."""

    group_id: int
    reason: str


class Metrics(msgspec.Struct, tag=True, frozen=True):
    """What the rollout process measured since its last such message."""

    window: dict[str, Any]


class EvalResult(msgspec.Struct, tag=True, frozen=True):
    """Result of one named evaluation under exactly one weight version."""

    name: str
    result: dict[str, float]


class _ReadyHeader(msgspec.Struct, tag="Ready", frozen=True):
    group_id: int
    row_index: int
    epoch: int
    version: int
    ready_at: float
    sources: list[str]
    advantages: list[float]
    slots: list[int]
    heads: int
    has_candidates: bool
    arrays: list[tuple[str, list[int]]]


Message = Start | VersionUpdate | Credit | RunEval | Finish | Resolved | Metrics | EvalResult
_decoder = msgspec.msgpack.Decoder(Message | _ReadyHeader)
_encoder = msgspec.msgpack.Encoder()


def encode(message: Message | ReadyGroup) -> list[bytes | memoryview]:
    """The buffers of one frame, ready for `writelines`; arrays are not copied where they are contiguous."""
    if not isinstance(message, ReadyGroup):
        header = _encoder.encode(message)
        return [_LENGTHS.pack(len(header), 0), header]
    arrays = _ready_arrays(message)
    header = _encoder.encode(
        _ReadyHeader(
            message.group_id,
            message.row_index,
            message.epoch,
            message.version,
            message.ready_at,
            list(message.source_rewards),
            [s.advantage for s in message.samples],
            [s.rollout_index for s in message.samples],
            message.samples[0].head_ids.shape[1] if message.samples else 0,
            bool(message.samples) and message.samples[0].candidates is not None,
            [(a.dtype.str, list(a.shape)) for a in arrays],
        )
    )
    payload = sum(a.nbytes for a in arrays)
    return [_LENGTHS.pack(len(header), payload), header, *(a.reshape(-1).view(np.uint8).data for a in arrays if a.size)]


def _ready_arrays(group: ReadyGroup) -> list[np.ndarray]:
    samples = group.samples
    lengths = np.fromiter((len(s.token_ids) for s in samples), np.int64, len(samples))
    trained = np.fromiter((len(s.head_ids) for s in samples), np.int64, len(samples))
    heads = samples[0].head_ids.shape[1] if samples else 0

    def join(name: str, dtype: Any, empty: tuple[int, ...] = (0,)) -> np.ndarray:
        parts = [getattr(s, name) for s in samples]
        joined = np.concatenate(parts) if parts else np.zeros(empty, dtype)
        return np.ascontiguousarray(joined, dtype)

    arrays = [
        lengths,
        trained,
        join("token_ids", np.int32),
        join("loss_mask", np.bool_),
        join("sampler_logprobs", np.float32),
        join("versions", np.int32),
        join("head_ids", np.int32, (0, heads)),
        join("head_logprobs", np.float32, (0, heads)),
        np.ascontiguousarray(group.rewards, np.float64),
        np.ascontiguousarray(group.rollout_indices, np.int32),
        *(np.ascontiguousarray(v, np.float64) for v in group.source_rewards.values()),
    ]
    if samples and samples[0].candidates is not None:
        sets = [s.candidates for s in samples]
        arrays += [np.concatenate([c.values for c in sets]), np.concatenate([np.diff(c.offsets) for c in sets])]
    return arrays


def decode(header: bytes, payload: bytes | bytearray | memoryview) -> Message | ReadyGroup:
    """The message of one frame; arrays are views into `payload`."""
    message = _decoder.decode(header)
    if not isinstance(message, _ReadyHeader):
        return message
    arrays, at, view = [], 0, memoryview(payload)
    for dtype, shape in message.arrays:
        if dtype not in ("<i8", "<i4", "|b1", "<f4", "<f8"):
            raise WireError(f"unexpected array type {dtype} on the wire")
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        arrays.append(np.frombuffer(view[at : at + size], dtype).reshape(shape))
        at += size
    return _ready_group(message, arrays)


def _ready_group(header: _ReadyHeader, arrays: list[np.ndarray]) -> ReadyGroup:
    lengths, trained, token_ids, loss_mask, logprobs, versions, head_ids, head_logprobs, rewards, slots = arrays[:10]
    sources = dict(zip(header.sources, arrays[10:], strict=False))
    candidate_values, candidate_lengths = arrays[-2:] if header.has_candidates else (None, None)
    token_at, term_at = np.concatenate([[0], np.cumsum(lengths)]), np.concatenate([[0], np.cumsum(trained)])
    candidate_at = np.concatenate([[0], np.cumsum(candidate_lengths)]) if header.has_candidates else None
    samples = []
    for i, advantage in enumerate(header.advantages):
        tokens, terms = slice(token_at[i], token_at[i + 1]), slice(term_at[i], term_at[i + 1])
        candidates = None
        if header.has_candidates:
            offsets = candidate_at[term_at[i] : term_at[i + 1] + 1]
            candidates = Ragged(candidate_values[offsets[0] : offsets[-1]], offsets - offsets[0])
        samples.append(
            Sample(
                token_ids[tokens],
                loss_mask[tokens],
                logprobs[tokens],
                versions[tokens],
                advantage,
                head_ids[terms],
                head_logprobs[terms],
                candidates,
                header.group_id,
                header.slots[i],
            )
        )
    return ReadyGroup(
        group_id=header.group_id,
        row_index=header.row_index,
        epoch=header.epoch,
        samples=tuple(samples),
        rewards=rewards,
        source_rewards=sources,
        rollout_indices=slots,
        version=header.version,
        ready_at=header.ready_at,
    )


def frame(message: Message | ReadyGroup) -> bytes:
    """One whole frame as bytes, for a file of frames such as the ready groups of a checkpoint."""
    return b"".join(bytes(b) for b in encode(message))


def frames(data: bytes) -> list[Message | ReadyGroup]:
    """The messages of a file of frames; raises WireError if it ends inside one."""
    messages, at = [], 0
    while at < len(data):
        if at + _LENGTHS.size > len(data):
            raise WireError("a file of frames is cut off")
        header_size, payload_size = _LENGTHS.unpack_from(data, at)
        at += _LENGTHS.size
        end = at + header_size + payload_size
        if end > len(data):
            raise WireError("a file of frames is cut off")
        messages.append(decode(data[at : at + header_size], data[at + header_size : end]))
        at = end
    return messages


def _proof(key: str, role: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(bytes.fromhex(key), role + first + second, "sha256")


class Link:
    """The rollout process's end of the wire (asyncio)."""

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
            header_size, payload_size = _LENGTHS.unpack(await self._reader.readexactly(_LENGTHS.size))
            _check_sizes(header_size, payload_size)
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


async def connect(host: str, port: int, key: str, timeout_s: float = 1800.0) -> Link:
    """Connect to trainer rank 0, retrying until it listens; StallError after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            reader, writer = await asyncio.open_connection(host, port, limit=1 << 22)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise StallError(f"waited {timeout_s:.0f} s for the trainer to listen on {host}:{port}") from error
            await asyncio.sleep(0.1)
    async with asyncio.timeout(_HANDSHAKE_S):
        theirs, ours = await reader.readexactly(32), secrets.token_bytes(32)
        writer.write(ours + _proof(key, b"rollout", theirs, ours))
        if not hmac.compare_digest(await reader.readexactly(32), _proof(key, b"trainer", ours, theirs)):
            raise WireError(f"{host}:{port} does not know the key of this run")
        link = Link(reader, writer)
        start = await link.receive()
    if not isinstance(start, Start):
        raise WireError(f"expected the start state, got {type(start).__name__}")
    link.start = start
    return link


def _check_sizes(header_size: int, payload_size: int) -> None:
    if header_size > _MAX_HEADER or payload_size > _MAX_PAYLOAD:
        raise WireError(f"a frame of {header_size} + {payload_size} bytes is over the limit")


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
                header_size, payload_size = _LENGTHS.unpack(self._read(_LENGTHS.size))
                _check_sizes(header_size, payload_size)
                self._on_message(decode(bytes(self._read(header_size)), self._read(payload_size)))
        except BaseException as error:  # reported by the training loop at its next look, never lost
            if not self._closing:
                self.error = error

    def _authenticate(self, peer: socket.socket) -> socket.socket | None:
        peer.settimeout(_HANDSHAKE_S)
        ours = secrets.token_bytes(32)
        try:
            peer.sendall(ours)
            answer = b""
            while len(answer) < 64:
                part = peer.recv(64 - len(answer))
                if not part:
                    raise ConnectionError("closed during the handshake")
                answer += part
            theirs, proof = answer[:32], answer[32:]
            if not hmac.compare_digest(proof, _proof(self._key, b"rollout", ours, theirs)):
                raise ConnectionError("wrong key")
            peer.sendall(_proof(self._key, b"trainer", theirs, ours))
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
            count = self._peer.recv_into(view[at:])
            if count == 0:
                raise WireError("the rollout process closed the connection")
            at += count
        return data

    def _write(self) -> None:
        while (buffers := self._outgoing.get()) is not None:
            try:
                for buffer in buffers:
                    self._peer.sendall(buffer)
            except OSError as error:
                if not self._closing:
                    self.error = error
                return
