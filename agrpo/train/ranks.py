"""The trainer's ranks: their process group, and how rank 0 hands each of them its part of a step.

Rank 0 alone knows the plan. Each rank gets its own rows and what their samples count as one message of array buffers
over CPU tensors; between steps rank 0 sends `idle` messages, so that no rank waits in silence (ARCH-9).
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import socket
import sys
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from agrpo.train.shares import Sharing
from agrpo.types import Ragged, Row, Step

SUPERVISOR_FIRST_S = 30.0  # it ends a silent rank at the limit and says which; the collective's own error says less


@dataclass(frozen=True, slots=True)
class Work:
    """What a rank does next: `step`, `idle` (look again), `resend` (the weights, to a restarted server) or `end`."""

    kind: str
    index: int = 0  # of the step
    rows: tuple[Row, ...] = ()  # per microbatch: this rank's row
    shares: tuple[
        np.ndarray, ...
    ] = ()  # per microbatch: [samples of the row] float32, what a term of the sample counts
    num_updates: int = 1  # equal parts of the microbatches, each with an update of its own

    @property
    def microbatches_per_update(self) -> int:
        return len(self.rows) // self.num_updates


IDLE, RESEND, END = Work("idle"), Work("resend"), Work("end")


def divide(step: Step, sharing: Sharing) -> list[Work]:
    """The work of each rank: its rows, and its samples' shares of the whole step's loss."""
    shares = sharing.of_step(step)
    return [
        Work(
            "step",
            step.index,
            tuple(m.rows[rank] for m in step.microbatches),
            tuple(s[rank] for s in shares),
            sharing.num_updates,
        )
        for rank in range(len(step.microbatches[0].rows))
    ]


class Ranks:
    """This process's place among the trainer's ranks, from torchrun's environment variables."""

    def __init__(self, use_cpu: bool, timeout_s: float):
        self.rank, self.world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        has_gpu = torch.cuda.is_available() and not use_cpu
        self.device = torch.device("cuda", local_rank) if has_gpu else torch.device("cpu")
        if has_gpu:
            torch.cuda.set_device(self.device)
        if self.world_size > 1:
            backend = "cpu:gloo,cuda:nccl" if has_gpu else "gloo"
            timeout = datetime.timedelta(seconds=timeout_s + SUPERVISOR_FIRST_S)
            dist.init_process_group(
                backend, store=self._loopback_store(timeout), rank=self.rank, world_size=self.world_size, timeout=timeout
            )

    def _loopback_store(self, timeout: datetime.timedelta) -> dist.Store | None:
        """The meeting point of ranks on one machine, closed to the network; None leaves it to torch's variables."""
        host, port = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", 0))
        if host != "127.0.0.1" or "TORCHELASTIC_RUN_ID" in os.environ:
            return None
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform.startswith("linux") else "lo0")
        if not self.is_first:
            return dist.TCPStore(host, port, self.world_size, timeout=timeout)
        listener = socket.create_server((host, port))
        return dist.TCPStore(
            host, port, self.world_size, is_master=True, timeout=timeout, master_listen_fd=listener.detach()
        )

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()

    def share(self, works: list[Work] | None) -> Work:
        """Rank 0 gives one Work per rank (others None); every rank gets its own."""
        if self.world_size == 1:
            return works[0]
        payloads = [encode_work(w) for w in works] if self.is_first else []
        sizes = torch.tensor([len(p) for p in payloads] if self.is_first else [0] * self.world_size)
        dist.broadcast(sizes, src=0)
        if self.is_first:
            for rank in range(1, self.world_size):
                dist.send(torch.frombuffer(bytearray(payloads[rank]), dtype=torch.uint8), rank)
            return works[0]
        buffer = torch.empty(int(sizes[self.rank]), dtype=torch.uint8)
        dist.recv(buffer, 0)
        return decode_work(buffer.numpy().tobytes())

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank."""
        if self.world_size == 1:
            return flag
        box = torch.tensor([int(flag)])
        dist.all_reduce(box, dist.ReduceOp.MAX)
        return bool(box)

    def tell(self, number: int) -> int:
        """Rank 0's number on every rank."""
        if self.world_size == 1:
            return number
        box = torch.tensor([int(number)])  # also of a bool: all ranks need the same dtype
        dist.broadcast(box, src=0)
        return int(box)

    def close(self) -> None:
        if self.world_size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def encode_work(work: Work) -> bytes:
    """A Work as MessagePack with arrays as (dtype, shape, bytes)."""
    rows = [{f.name: _plain(getattr(row, f.name)) for f in dataclasses.fields(Row)} for row in work.rows]
    shares = [_plain(s) for s in work.shares]
    return msgspec.msgpack.encode([work.kind, work.index, rows, shares, work.num_updates])


def decode_work(data: bytes) -> Work:
    kind, index, rows, shares, num_updates = msgspec.msgpack.decode(data)
    rows = tuple(Row(**{name: _restored(value) for name, value in row.items()}) for row in rows)
    return Work(kind, index, rows, tuple(_restored(s) for s in shares), num_updates)


def _plain(value: Any) -> Any:
    if isinstance(value, Ragged):
        return {"values": _plain(value.values), "offsets": _plain(value.offsets)}
    return [value.dtype.str, list(value.shape), value.tobytes()] if isinstance(value, np.ndarray) else value


def _restored(value: Any) -> Any:
    if isinstance(value, dict):
        return Ragged(_restored(value["values"]), _restored(value["offsets"]))
    if isinstance(value, list):
        dtype, shape, data = value
        return np.frombuffer(data, dtype).reshape(shape)
    return value
