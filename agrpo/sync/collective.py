"""Tensors broadcast from trainer rank 0 to the receivers inside the servers, over a process group of their own.

One chunk is one HTTP call: `/update_weights` carries names, dtypes and shapes of exactly the tensors that follow
(SYNC-6), and the receiver says through the store that it listens before a byte is sent. So a server that fails to
receive is an error at once, and never a broadcast that waits for nobody. Chunk layout on both sides: tensors one after
the other, each at a multiple of 16 bytes, broadcast in pieces of at most `bucket_bytes`.

Imports only what a server's own environment has: standard library and torch.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from agrpo.sync.control import ServerControl

ALIGNMENT = 16  # bytes; every dtype can be viewed at such an offset
LONGEST_SLEEP_S = 0.002
AFTER_ANSWER_S = 5.0

# (store, rank, world_size, timeout, address) -> process group
MakeGroup = Callable[[dist.Store, int, int, timedelta, str], Any]


def layout(dtype_names: Sequence[str], shapes: Sequence[Sequence[int]]) -> tuple[list[int], int]:
    """Byte offset of each tensor in the chunk, and the chunk's size: float32 [3], float32 [2] -> [0, 16], 24."""
    offsets, end = [], 0
    for dtype_name, shape in zip(dtype_names, shapes, strict=True):
        start = -(-end // ALIGNMENT) * ALIGNMENT
        offsets.append(start)
        end = start + math.prod(shape) * getattr(torch, dtype_name).itemsize
    return offsets, end


class CollectiveTransport:
    """Transport over a process group: rank 0 is this process, the servers' workers are 1 to n."""

    def __init__(self, server: ServerControl, make_group: MakeGroup, device: torch.device | str, bucket_bytes: int):
        self.server, self.make_group, self.device, self.bucket_bytes = server, make_group, device, bucket_bytes
        self.has_sent = False
        self._group: Any = None
        self._store: Any = None
        self._num_chunks = 0

    def connect(self) -> None:
        """Open the group with all receivers; each joins inside its server's init call."""
        if self._group is not None:
            return
        timeout = timedelta(seconds=self.server.timeout_s)
        sizes = self.server.world_sizes()
        world_size = 1 + sum(sizes)
        address = _own_address(self.server.urls)
        self._store, port = _host_store(address, timeout)
        bodies, offset = [], 1
        for size in sizes:
            info = {"master_address": address, "master_port": port, "rank_offset": offset, "world_size": world_size}
            bodies.append({"init_info": {**info, "timeout_s": self.server.timeout_s}})
            offset += size
        calls = self.server.begin("/init_weight_transfer_engine", bodies)
        joined = [f"join/{rank}" for rank in range(1, world_size)]
        self._wait(lambda: self._store.check(joined), calls, "receivers to join the transfer group")
        self._group = self.make_group(self._store, 0, world_size, timeout, address)
        self._finish_calls(calls)
        self._num_chunks = 0

    def start(self, version: int) -> None:
        self.server.start_update()

    def send(self, bucket: list[tuple[str, torch.Tensor]]) -> None:
        """Announce one chunk and broadcast it."""
        names = [name for name, _ in bucket]
        dtype_names = [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket]
        shapes = [list(tensor.shape) for _, tensor in bucket]
        offsets, size = layout(dtype_names, shapes)
        flat = torch.empty(size, dtype=torch.uint8, device=self.device)
        for (_, tensor), offset in zip(bucket, offsets, strict=True):
            num_bytes = tensor.numel() * tensor.element_size()
            flat[offset : offset + num_bytes].copy_(tensor.contiguous().reshape(-1).view(torch.uint8))
        info = {"names": names, "dtype_names": dtype_names, "shapes": shapes, "bucket_bytes": self.bucket_bytes}
        calls = self.server.begin("/update_weights", [{"update_info": info}] * len(self.server.urls))
        ready = [f"ready/{self._num_chunks}/{rank}" for rank in range(1, self._group.size())]
        self._wait(lambda: self._store.check(ready), calls, "receivers to listen for weights")
        for key in ready:
            self._store.delete_key(key)
        self._num_chunks += 1
        self.has_sent = True
        for piece in flat.split(self.bucket_bytes):
            work = self._group.broadcast(piece, 0)
            self._wait(work.is_completed, calls, "a broadcast of weights")
            work.wait()
        self._finish_calls(calls)

    def end(self) -> None:
        """Nothing to do: the last update call has returned."""

    def finish(self, version: int) -> None:
        self.server.finish_update(version)

    def close(self) -> None:
        self._group = self._store = None

    def _wait(self, is_done: Callable[[], bool], calls: list[Future], awaited: str) -> None:
        """Wait for the other side and watch the HTTP calls that make it act; the first failure is the error."""
        deadline = time.monotonic() + self.server.timeout_s
        sleep_s, answered = 0.0001, False
        while not is_done():
            for call in calls:
                if call.done():
                    call.result()
            if not answered and all(call.done() for call in calls):
                # The far side is through: this side needs a moment at most to notice.
                answered, deadline = True, min(deadline, time.monotonic() + AFTER_ANSWER_S)
            if time.monotonic() > deadline:
                if answered:
                    raise RuntimeError(f"the server answered without taking part while waiting for {awaited}")
                raise TimeoutError(f"waited {self.server.timeout_s:g} s for {awaited}; raise server.timeout")
            time.sleep(sleep_s)
            sleep_s = min(2 * sleep_s, LONGEST_SLEEP_S)

    def _finish_calls(self, calls: list[Future]) -> None:
        for call in calls:
            call.result(timeout=self.server.timeout_s)


class CollectiveReceiver:
    """The other end, in a server worker; `worker_rank` counts the workers of one server."""

    def __init__(self, init_info: dict, make_group: MakeGroup, device: torch.device | str, worker_rank: int = 0):
        timeout = timedelta(seconds=float(init_info.get("timeout_s", 1800.0)))
        address, port = init_info["master_address"], int(init_info["master_port"])
        self.device, self.rank = device, int(init_info["rank_offset"]) + worker_rank
        self._store = dist.TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)
        self._store.set(f"join/{self.rank}", "1")
        self._group = make_group(self._store, self.rank, int(init_info["world_size"]), timeout, address)
        self._num_chunks = 0

    def receive(self, update_info: dict) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of one update call, in the sender's order; views of one buffer that lives as long as they do.

        Nothing is yielded before the whole chunk is here, so a broken transfer changes no weight of this chunk.
        """
        offsets, size = layout(update_info["dtype_names"], update_info["shapes"])
        flat = torch.empty(size, dtype=torch.uint8, device=self.device)
        self._store.set(f"ready/{self._num_chunks}/{self.rank}", "1")
        self._num_chunks += 1
        try:
            for piece in flat.split(int(update_info["bucket_bytes"])):
                self._group.broadcast(piece, 0).wait()
        except BaseException:
            self.close()
            raise
        rows = zip(update_info["names"], update_info["dtype_names"], update_info["shapes"], offsets, strict=True)
        for name, dtype_name, shape, offset in rows:
            dtype = getattr(torch, dtype_name)
            num_bytes = math.prod(shape) * dtype.itemsize
            yield name, flat[offset : offset + num_bytes].view(dtype).view(shape)

    def close(self) -> None:
        """Leave the group; a sender that still broadcasts sees the connection close."""
        self._group = self._store = None


def _host_store(address: str, timeout: timedelta) -> tuple[dist.Store, int]:
    """A store on a free port of `address` only, so that a group on loopback is not offered to the network."""
    listener = socket.create_server((address, 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        address, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


def _own_address(urls: Sequence[str]) -> str:
    """The address of this host that the servers reach; loopback only if all of them are on loopback."""
    addresses = []
    for url in urls:
        parts = urlsplit(url)
        found = socket.getaddrinfo(parts.hostname or "localhost", parts.port or 80, type=socket.SOCK_DGRAM)
        family, kind, _, _, target = min(found, key=lambda entry: entry[0] != socket.AF_INET)
        # A connected UDP socket sends nothing; it only asks the routing table.
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            addresses.append(probe.getsockname()[0])
    return next((address for address in addresses if not address.startswith("127.")), addresses[0])
