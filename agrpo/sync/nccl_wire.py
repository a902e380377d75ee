"""vLLM's own NCCL protocol: what a stock vLLM of 0.32 or newer receives with --weight-transfer-config nccl.

The members meet through an NCCL id inside the init call, each bucket is one update call, and its bytes are one
broadcast: tensors one after the other without gaps. vLLM's receiver cuts what one update call announces into packs of
`packed_buffer_size_bytes`; a bucket is never larger, unless it is a single tensor, so it is always exactly one pack.

The receiver sends no sign that it listens, and vLLM takes the model's layers apart when an update starts. So from the
start on the weights count as touched.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch

from agrpo.sync.collective import CollectiveTransport, finish, layout, views, wait

if TYPE_CHECKING:
    from agrpo.sync.bucket import Bucket, Packer
    from agrpo.sync.control import ServerControl

# (unique id, rank, world_size) -> communicator
OpenGroup = Callable[[bytes, int, int], Any]


class PackedTransport(CollectiveTransport):
    """The sender; `packer` must be dense."""

    def __init__(
        self,
        server: ServerControl,
        packer: Packer,
        pack_bytes: int,
        new_unique_id: Callable[[], bytes],
        open_group: OpenGroup,
    ):
        super().__init__(server, packer, None)
        self.pack_bytes = pack_bytes
        self.new_unique_id, self.open_group = new_unique_id, open_group

    def start(self, version: int) -> None:
        if self.found_paused:
            # An update that broke off leaves layers apart, and the next start would skip them: this closes them.
            self.server.reload_weights(None)
        self.has_sent = True
        super().start(version)

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
        super().close()

    def _join(self, offsets: list[int], world_size: int) -> Any:
        unique_id = self.new_unique_id()
        shared = {
            "world_size": world_size,
            "nccl_unique_id_b64": base64.b64encode(unique_id).decode(),
            "packed": True,
            "packed_buffer_size_bytes": self.pack_bytes,
            "packed_num_buffers": 1,
        }
        bodies = [{"init_info": {**shared, "rank_offset": offset}} for offset in offsets]
        calls = self.server.begin("/init_weight_transfer_engine", bodies)
        joining: Future = Future()

        def join() -> None:
            try:
                joining.set_result(self.open_group(unique_id, 0, world_size))
            except BaseException as error:
                joining.set_exception(error)

        # Meeting cannot be interrupted: in a thread, so that a server that refuses is an error at once.
        threading.Thread(target=join, name="nccl-join", daemon=True).start()
        wait(joining.done, calls, "servers to join the NCCL group", self.server.timeout_s)
        group = joining.result()
        finish(calls, self.server.timeout_s)
        return group

    def _broadcast(self, bucket: Bucket) -> None:
        """Announce one bucket and broadcast it. The servers load it while the next one is gathered."""
        self._await_loading()
        calls = self.server.begin("/update_weights", [{"update_info": bucket.manifest()}] * len(self.server.urls))
        # Dense, so all of it is one piece.
        work = self._group.broadcast(bucket.pieces[0], 0)
        wait(work.is_completed, calls, "a broadcast of weights", self.server.timeout_s)
        work.wait()
        self._loading = calls


class PackedReceiver:
    """The other end for the embedded server; vLLM has its own."""

    def __init__(self, init_info: dict, open_group: OpenGroup, device: torch.device | str, worker_rank: int = 0):
        self.device = device
        unique_id = base64.b64decode(init_info["nccl_unique_id_b64"], validate=True)
        rank = int(init_info["rank_offset"]) + worker_rank
        self._group = open_group(unique_id, rank, int(init_info["world_size"]))

    def receive(self, update_info: dict) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of one update call, once all of its bytes are here."""
        offsets, size = layout(update_info["dtype_names"], update_info["shapes"], alignment=1)
        flat = torch.empty(size, dtype=torch.uint8, device=self.device)
        self._group.broadcast(flat, 0).wait()
        yield from views(flat, update_info, offsets)

    def close(self) -> None:
        self._group.close()
