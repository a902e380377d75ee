"""The messages of the wire and their frames: MessagePack headers, arrays as raw buffers."""

from __future__ import annotations

import hmac
import struct
from typing import Any

import msgspec
import numpy as np

from agrpo.errors import AgrpoError
from agrpo.types import Ragged, ReadyGroup, Sample

LENGTHS = struct.Struct("<IQ")
_MAX_HEADER, _MAX_PAYLOAD = 1 << 26, 1 << 33
HANDSHAKE_S = 30.0


class WireError(AgrpoError):
    """The channel broke or the other end is not who it says."""

    is_consequence = True


class Start(msgspec.Struct, tag=True, frozen=True):
    """First message to the rollout process: where the run stands (RES-4, RES-13)."""

    step: int  # optimizer steps done
    version: int  # weight version the server holds now
    resolved: list[tuple[int, int]]  # half-open intervals of resolved group ids
    ready: list[int]  # group ids the trainer already holds samples of
    taken_tokens: int
    pulled_tokens: int
    limit_tokens: int
    adapters: str = ""  # what names of adapters begin with, where each version is one (LORA-10)
    loop_state: bytes | None = None  # of the checkpoint that is resumed (LOOP-16)
    concurrency_cap: int | None = None  # where the controller stood at that checkpoint


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
    """Run these evaluations; the servers serve `version`, and keep it until they are through or StopEval is sent."""

    version: int
    names: list[str]
    is_alone: bool = False  # nothing is left to train: no group need start meanwhile


class StopEval(msgspec.Struct, tag=True, frozen=True):
    """The weights are about to change: give up the evaluations that still generate."""


class AskState(msgspec.Struct, tag=True, frozen=True):
    """A checkpoint is written: send the state of the user's loop (LOOP-16)."""


class Finish(msgspec.Struct, tag=True, frozen=True):
    """The run is over: stop, close, exit."""


class LoopState(msgspec.Struct, tag=True, frozen=True):
    """What the user's loop wants kept, as MessagePack; None where it keeps nothing."""

    state: bytes | None


class Resolved(msgspec.Struct, tag=True, frozen=True):
    """A group that needs no more work and brought no sample (ADV-7, GEN-14)."""

    group_id: int
    reason: str


class Metrics(msgspec.Struct, tag=True, frozen=True):
    """What the rollout process measured since its last such message."""

    window: dict[str, Any]


class EvalResult(msgspec.Struct, tag=True, frozen=True):
    """Result of one named evaluation under exactly one weight version; {} where it was given up."""

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
    sample_rewards: list[float]
    slots: list[int]
    heads: int
    has_candidates: bool
    arrays: list[tuple[str, list[int]]]


Message = Start | VersionUpdate | Credit | RunEval | StopEval | AskState | Finish | LoopState | Resolved | Metrics | EvalResult
_decoder = msgspec.msgpack.Decoder(Message | _ReadyHeader)
_encoder = msgspec.msgpack.Encoder()


def encode(message: Message | ReadyGroup) -> list[bytes | memoryview]:
    """The buffers of one frame, ready for `writelines`; arrays are not copied where they are contiguous."""
    if not isinstance(message, ReadyGroup):
        header = _encoder.encode(message)
        return [LENGTHS.pack(len(header), 0), header]
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
            [s.reward for s in message.samples],
            [s.rollout_index for s in message.samples],
            message.samples[0].head_ids.shape[1] if message.samples else 0,
            bool(message.samples) and message.samples[0].candidates is not None,
            [(a.dtype.str, list(a.shape)) for a in arrays],
        )
    )
    payload = sum(a.nbytes for a in arrays)
    return [LENGTHS.pack(len(header), payload), header, *(a.reshape(-1).view(np.uint8).data for a in arrays if a.size)]


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
        np.ascontiguousarray(group.references, np.float64),
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
    lengths, trained, token_ids, loss_mask, logprobs, versions, head_ids, head_logprobs = arrays[:8]
    rewards, slots, references = arrays[8:11]
    sources = dict(zip(header.sources, arrays[11:], strict=False))
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
                header.sample_rewards[i],
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
        references=references,
    )


def frame(message: Message | ReadyGroup) -> bytes:
    """One whole frame as bytes, for a file of frames such as the ready groups of a checkpoint."""
    return b"".join(bytes(b) for b in encode(message))


def frames(data: bytes) -> list[Message | ReadyGroup]:
    """The messages of a file of frames; raises WireError if it ends inside one."""
    messages, at = [], 0
    while at < len(data):
        if at + LENGTHS.size > len(data):
            raise WireError("a file of frames is cut off")
        header_size, payload_size = LENGTHS.unpack_from(data, at)
        at += LENGTHS.size
        end = at + header_size + payload_size
        if end > len(data):
            raise WireError("a file of frames is cut off")
        messages.append(decode(data[at : at + header_size], data[at + header_size : end]))
        at = end
    return messages


def check_sizes(header_size: int, payload_size: int) -> None:
    if header_size > _MAX_HEADER or payload_size > _MAX_PAYLOAD:
        raise WireError(f"a frame of {header_size} + {payload_size} bytes is over the limit")


def proof(key: str, role: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(bytes.fromhex(key), role + first + second, "sha256")
