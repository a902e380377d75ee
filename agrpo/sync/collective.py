"""Tensors broadcast from trainer rank 0 to the receivers inside the servers, over a process group of their own.

One bucket is one HTTP call: `/update_weights` carries names, dtypes and shapes of exactly the tensors that follow
(SYNC-6), and the receiver says through the store that it listens before a byte is sent. So a server that fails to
receive is an error at once, and never a broadcast that waits for nobody. Layout on both sides: tensors one after the
other, each at a multiple of 16 bytes; `pieces` says which stretches of bytes are broadcast, one after the other.

Imports only what a server's own environment has, the standard library and torch: vLLM's plug-in loads this file by path.
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
    from agrpo.sync.bucket import Bucket, Packer
    from agrpo.sync.control import ServerControl

ALIGNMENT = 16  # bytes; every dtype can be viewed at such an offset
LONGEST_SLEEP_S = 0.002
AFTER_ANSWER_S = 5.0

# (store, rank, world_size, timeout, address) -> process group
MakeGroup = Callable[[dist.Store, int, int, timedelta, str], Any]


def layout(
    dtype_names: Sequence[str], shapes: Sequence[Sequence[int]], alignment: int = ALIGNMENT
) -> tuple[list[int], int]:
    """Byte offset of each tensor in the bucket, and the bucket's size: float32 [3], float32 [2] -> [0, 16], 24."""
    offsets, end = [], 0
    for dtype_name, shape in zip(dtype_names, shapes, strict=True):
        start = -(-end // alignment) * alignment
        offsets.append(start)
        end = start + math.prod(shape) * getattr(torch, dtype_name).itemsize
    return offsets, end


def views(flat: torch.Tensor, update_info: dict, offsets: Sequence[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a received bucket by name, as views of its bytes."""
    rows = zip(update_info["names"], update_info["dtype_names"], update_info["shapes"], offsets, strict=True)
    for name, dtype_name, shape, offset in rows:
        dtype = getattr(torch, dtype_name)
        num_bytes = math.prod(shape) * dtype.itemsize
        yield name, flat[offset : offset + num_bytes].view(dtype).view(shape)


class CollectiveTransport:
    """Transport over a process group: rank 0 is this process, the servers' workers are 1 to n."""

    def __init__(self, server: ServerControl, packer: Packer, make_group: MakeGroup | None):
        self.server, self.packer, self.make_group = server, packer, make_group
        self.has_sent = self.found_paused = False
        self._group: Any = None
        self._store: Any = None
        self._dtype_name: str | None = None
        self._num_buckets = 0
        self._loading: list[Future] = []  # update calls whose bytes are there and whose answer is not

    def connect(self) -> None:
        """Open the group with all receivers; each joins inside its server's init call."""
        if self._group is not None:
            return
        self._dtype_name = self.server.dtype_name()
        sizes, offsets, offset = self.server.world_sizes(), [], 1
        for size in sizes:
            offsets.append(offset)
            offset += size
        self._group = self._join(offsets, offset)
        self._num_buckets = 0

    def _join(self, offsets: list[int], world_size: int) -> Any:
        """The group, with the workers of server i at ranks from `offsets[i]` on."""
        timeout = timedelta(seconds=self.server.timeout_s)
        address = own_address(self.server.urls)
        self._store, port = _host_store(address, timeout)
        shared = {"master_address": address, "master_port": port, "world_size": world_size}
        shared["timeout_s"] = self.server.timeout_s
        bodies = [{"init_info": {**shared, "rank_offset": offset}} for offset in offsets]
        calls = self.server.begin("/init_weight_transfer_engine", bodies)
        joined = [f"join/{rank}" for rank in range(1, world_size)]
        wait(lambda: self._store.check(joined), calls, "receivers to join the transfer group", self.server.timeout_s)
        group = self.make_group(self._store, 0, world_size, timeout, address)
        finish(calls, self.server.timeout_s)
        return group

    def start(self, version: int) -> None:
        self.server.start_update()
        self.packer.start(self._dtype_name)

    def send(self, name: str, tensor: torch.Tensor) -> None:
        for bucket in self.packer.add(name, tensor):
            self._broadcast(bucket)

    def end(self) -> None:
        """Send what is left and wait until all of it is loaded."""
        for bucket in self.packer.flush():
            self._broadcast(bucket)
        self._await_loading()
        self.packer.close()

    def finish(self, version: int) -> None:
        self.server.finish_update(version)

    def close(self) -> None:
        self._group = self._store = None
        self._loading = []
        self.packer.close()

    def _broadcast(self, bucket: Bucket) -> None:
        """Announce one bucket and broadcast it. The servers load it while the next one is gathered."""
        self._await_loading()
        info = {**bucket.manifest(), "pieces": bucket.spans()}
        calls = self.server.begin("/update_weights", [{"update_info": info}] * len(self.server.urls))
        ready = [f"ready/{self._num_buckets}/{rank}" for rank in range(1, self._group.size())]
        wait(lambda: self._store.check(ready), calls, "receivers to listen for weights", self.server.timeout_s)
        for key in ready:
            self._store.delete_key(key)
        self._num_buckets += 1
        self.has_sent = True
        for work in [self._group.broadcast(piece, 0) for piece in bucket.pieces]:
            wait(work.is_completed, calls, "a broadcast of weights", self.server.timeout_s)
            work.wait()
        self._loading = calls

    def _await_loading(self) -> None:
        calls, self._loading = self._loading, []
        finish(calls, self.server.timeout_s)


def wait(is_done: Callable[[], bool], calls: list[Future], awaited: str, timeout_s: float) -> None:
    """Wait for the other side and watch the HTTP calls that make it act; the first failure is the error."""
    deadline = time.monotonic() + timeout_s
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
            raise TimeoutError(f"waited {timeout_s:g} s for {awaited}; raise server.timeout")
        time.sleep(sleep_s)
        sleep_s = min(2 * sleep_s, LONGEST_SLEEP_S)


def finish(calls: list[Future], timeout_s: float) -> None:
    for call in calls:
        call.result(timeout=timeout_s)


class CollectiveReceiver:
    """The other end, in a server worker; `worker_rank` counts the workers of one server."""

    def __init__(
        self,
        init_info: dict,
        make_group: MakeGroup,
        device: torch.device | str,
        worker_rank: int = 0,
        is_reusing: bool = False,
    ):
        timeout = timedelta(seconds=float(init_info.get("timeout_s", 1800.0)))
        address, port = init_info["master_address"], int(init_info["master_port"])
        self.device, self.rank = device, int(init_info["rank_offset"]) + worker_rank
        self._store = dist.TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)
        self._store.set(f"join/{self.rank}", "1")
        self._group = make_group(self._store, self.rank, int(init_info["world_size"]), timeout, address)
        self._num_buckets = 0
        # With `is_reusing` each bucket overwrites the one before: for those who copy what they get at once.
        self._is_reusing, self._buffer = is_reusing, torch.empty(0, dtype=torch.uint8, device=device)

    def receive(self, update_info: dict) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of one update call, in the sender's order; views of one buffer that lives as long as they do.

        Nothing is yielded before the whole bucket is here, so a broken transfer changes no weight of this bucket.
        """
        offsets, size = layout(update_info["dtype_names"], update_info["shapes"])
        flat = self._memory(size)
        self._store.set(f"ready/{self._num_buckets}/{self.rank}", "1")
        self._num_buckets += 1
        try:
            for work in [self._group.broadcast(flat[start:end], 0) for start, end in update_info["pieces"]]:
                work.wait()
        except BaseException:
            self.close()
            raise
        yield from views(flat, update_info, offsets)

    def _memory(self, size: int) -> torch.Tensor:
        if not self._is_reusing:
            return torch.empty(size, dtype=torch.uint8, device=self.device)
        if len(self._buffer) < size:
            self._buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
        return self._buffer[:size]

    def close(self) -> None:
        """Leave the group; a sender that still broadcasts sees the connection close."""
        self._group = self._store = None


def gloo_group(store: Any, rank: int, world_size: int, timeout: timedelta, address: str) -> Any:
    """A gloo group of its own, beside the trainer's; on loopback it listens on loopback only."""
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    device = {"hostname": address} if address.startswith("127.") else {}
    options._devices = [dist.ProcessGroupGloo.create_device(**device)]
    return dist.ProcessGroupGloo(dist.PrefixStore("weights", store), rank, world_size, options)


def _host_store(address: str, timeout: timedelta) -> tuple[dist.Store, int]:
    """A store on a free port of `address` only, so that a group on loopback is not offered to the network."""
    listener = socket.create_server((address, 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        address, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


def own_address(urls: Sequence[str]) -> str:
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
