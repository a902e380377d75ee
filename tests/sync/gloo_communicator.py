"""The NCCL protocol without a GPU: a communicator with the same three methods over gloo, and a receiver that uses it.

Its id has NCCL's length and holds the port of the store where the members meet.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from agrpo.sync.libnccl import UNIQUE_ID_BYTES
from agrpo.sync.nccl_wire import PackedReceiver

TIMEOUT = timedelta(seconds=8)  # how long a broadcast that nobody receives lasts
_stores: dict[bytes, dist.Store] = {}  # of rank 0, which makes the id before it joins


def new_unique_id() -> bytes:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=TIMEOUT, wait_for_workers=False)
    unique_id = str(store.port).encode().ljust(UNIQUE_ID_BYTES, b"\0")
    _stores[unique_id] = store
    return unique_id


class GlooCommunicator:
    def __init__(self, unique_id: bytes, rank: int, world_size: int):
        store = _stores.pop(unique_id, None) if rank == 0 else None
        if store is None:
            port = int(unique_id.rstrip(b"\0"))
            store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT, wait_for_workers=False)
        options = dist.ProcessGroupGloo._Options()
        options._timeout = TIMEOUT
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        self._store, self._group = store, dist.ProcessGroupGloo(store, rank, world_size, options)

    def broadcast(self, flat, root: int):
        return self._group.broadcast(flat, root)

    def close(self) -> None:
        self._group = self._store = None


class PackedGlooReceiver(PackedReceiver):
    """For a server of the tests: `gloo_communicator.PackedGlooReceiver`."""

    def __init__(self, init_info: dict, device: str, worker_rank: int = 0):
        super().__init__(init_info, GlooCommunicator, device, worker_rank)
