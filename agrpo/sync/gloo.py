"""Weights over a gloo process group: CPU tensors over TCP, on any machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from agrpo.schema import setting
from agrpo.sync.session import MIB, PLUGIN, Session

if TYPE_CHECKING:
    import torch

    from agrpo.sync.control import ServerControl


LONGEST_BUCKET = 64 * MIB  # long enough to hide a call, short enough that the server loads while more is gathered


@dataclass(frozen=True, slots=True, kw_only=True)
class Gloo:
    """Sends weights through the host's memory; the server holds a `GlooReceiver`."""

    every_steps: int = setting(1, "optimizer steps between two syncs", ge=1)
    mode: str = setting("auto", "what is sent: merged weights or a LoRA adapter", choices=("auto", "merged", "lora"))
    cache: str = setting("reset", "the server's prefix cache at a sync", choices=("reset", "salt", "keep"))
    bucket_mb: int = setting(1024, "largest piece gathered and sent at once, MiB", ge=1)
    verify_every: int = setting(20, "prove every n-th sync; 0 = only the first", ge=0)

    receiver: ClassVar[str] = "agrpo.sync.gloo.GlooReceiver"  # import path for the embedded server
    backend: ClassVar[str] = "gloo"  # for vLLM's --weight-transfer-config; the plug-in knows it

    def server_environment(self) -> dict[str, str]:
        """Variables of a vLLM server; an entry of PYTHONPATH goes before what is there."""
        return {"PYTHONPATH": str(PLUGIN)}

    def open(self, server: ServerControl, run_dir: Path, device: Any, rank: int, world_size: int) -> Session:
        """The sender of this trainer rank; connects at the first sync."""
        transport = None
        if rank == 0:
            from agrpo.sync.bucket import Packer
            from agrpo.sync.collective import CollectiveTransport, gloo_group

            packer = Packer(self.bucket_mb * MIB, "cpu", longest=LONGEST_BUCKET)
            transport = CollectiveTransport(server, packer, gloo_group)
        return Session(server, transport, world_size=world_size, cache=self.cache, verify_every=self.verify_every)


class GlooReceiver:
    """The receiving end inside a server: `receive` yields (name, tensor) in the sender's order, on `device`."""

    def __init__(self, init_info: dict, device: Any = "cpu", worker_rank: int = 0):
        from agrpo.sync.collective import CollectiveReceiver, gloo_group

        self.device = device
        self._receiver = CollectiveReceiver(init_info, gloo_group, "cpu", worker_rank, is_reusing=True)

    def receive(self, update_info: dict) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._receiver.receive(update_info):
            yield name, tensor.to(self.device)

    def close(self) -> None:
        self._receiver.close()
