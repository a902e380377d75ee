"""Weights by NCCL: GPU to GPU, without a copy through the host, in the protocol that vLLM speaks by itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from agrpo.schema import setting
from agrpo.sync.session import MIB, Session

if TYPE_CHECKING:
    import torch

    from agrpo.sync.control import ServerControl


@dataclass(frozen=True, slots=True, kw_only=True)
class Nccl:
    """Sends weights from the trainer's GPU to the server's GPUs; needs both."""

    every_steps: int = setting(1, "optimizer steps between two syncs", ge=1)
    mode: str = setting("auto", "what is sent: merged weights or a LoRA adapter", choices=("auto", "merged", "lora"))
    cache: str = setting("reset", "the server's prefix cache at a sync", choices=("reset", "salt", "keep"))
    bucket_mb: int = setting(1024, "largest piece gathered and sent at once, MiB", ge=1)
    verify_every: int = setting(20, "prove every n-th sync; 0 = only the first", ge=0)

    receiver: ClassVar[str] = "agrpo.sync.nccl.NcclReceiver"  # import path for the embedded server
    backend: ClassVar[str] = "nccl"  # for --weight-transfer-config: vLLM's own

    def problems(self, config: Any) -> list[str]:
        if not getattr(config, "devices", ()):
            return ["sync=nccl needs a GPU, none is visible; use sync=gloo or sync=disk"]
        return []

    def server_environment(self) -> dict[str, str]:
        """Variables of a vLLM server: none, the transfer is vLLM's own."""
        return {}

    def open(self, server: ServerControl, run_dir: Path, device: Any, rank: int, world_size: int) -> Session:
        """The sender of this trainer rank; connects at the first sync."""
        transport = None
        if rank == 0:
            import torch

            from agrpo.sync.bucket import Packer
            from agrpo.sync.libnccl import Communicator, new_unique_id
            from agrpo.sync.nccl_wire import PackedTransport

            # By number: the group is joined in a thread, whose current GPU is the first one.
            index = torch.device(device).index
            device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
            size, join = self.bucket_mb * MIB, partial(Communicator, device=device)
            transport = PackedTransport(server, Packer(size, device, is_dense=True), size, new_unique_id, join)
        return Session(server, transport, world_size=world_size, cache=self.cache, verify_every=self.verify_every)


class NcclReceiver:
    """The receiving end inside the embedded server, on its GPU; it speaks as vLLM's own does."""

    def __init__(self, init_info: dict, device: Any, worker_rank: int = 0):
        from agrpo.sync.libnccl import Communicator
        from agrpo.sync.nccl_wire import PackedReceiver

        self._receiver = PackedReceiver(init_info, partial(Communicator, device=device), device, worker_rank)

    def receive(self, update_info: dict) -> Iterator[tuple[str, torch.Tensor]]:
        return self._receiver.receive(update_info)

    def close(self) -> None:
        self._receiver.close()
