"""Weights through a folder that trainer and server both see: slower, but it needs nothing on the server's side."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from agrpo.schema import setting
from agrpo.sync.session import MIB, PLUGIN, Session

if TYPE_CHECKING:
    import torch

    from agrpo.sync.bucket import Bucket, Packer
    from agrpo.sync.control import ServerControl


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """Writes safetensors below the run directory and asks the server to load them."""

    every_steps: int = setting(1, "optimizer steps between two syncs", ge=1)
    mode: str = setting("auto", "what is sent: merged weights or a LoRA adapter", choices=("auto", "merged", "lora"))
    cache: str = setting("reset", "the server's prefix cache at a sync", choices=("reset", "salt", "keep"))
    bucket_mb: int = setting(1024, "largest piece gathered and written at once, MiB", ge=1)
    verify_every: int = setting(20, "prove every n-th sync; 0 = only the first", ge=0)

    receiver: ClassVar[str] = ""  # the server reads the folder by itself
    backend: ClassVar[str | None] = None  # no --weight-transfer-config

    def server_environment(self) -> dict[str, str]:
        """Variables of a vLLM server; an entry of PYTHONPATH goes before what is there."""
        return {"PYTHONPATH": str(PLUGIN)}  # not for the transfer: it repairs tied embeddings of the CPU build

    def open(self, server: ServerControl, run_dir: Path, device: Any, rank: int, world_size: int) -> Session:
        """The sender of this trainer rank; writes nothing before the first sync."""
        transport = None
        if rank == 0:
            from agrpo.sync.bucket import Packer

            transport = FolderTransport(server, Packer(self.bucket_mb * MIB, "cpu"), Path(run_dir))
        return Session(server, transport, world_size=world_size, cache=self.cache, verify_every=self.verify_every)


class FolderTransport:
    """Transport through `<run_dir>/weights/v<version>/`, written beside and renamed when complete; older ones go."""

    def __init__(self, server: ServerControl, packer: Packer, run_dir: Path):
        self.server, self.packer, self.root = server, packer, run_dir.absolute() / "weights"
        self.has_sent = self.found_paused = False
        self._dtype_name: str | None = None
        self._version = 0
        self._files: list[dict[str, int]] = []  # per file: tensor name -> bytes

    @property
    def _beside(self) -> Path:
        return self.root / f".v{self._version}.{os.getpid()}"

    def connect(self) -> None:
        """Ask for the servers' dtype, once, before they are paused; every other call stands alone."""
        if self._dtype_name is None:
            self._dtype_name = self.server.dtype_name()

    def start(self, version: int) -> None:
        self._version, self._files = version, []
        shutil.rmtree(self._beside, ignore_errors=True)
        self._beside.mkdir(parents=True)
        self.packer.start(self._dtype_name)

    def send(self, name: str, tensor: torch.Tensor) -> None:
        for bucket in self.packer.add(name, tensor):
            self._write(bucket)

    def _write(self, bucket: Bucket) -> None:
        """One file per bucket."""
        from safetensors.torch import save_file

        tensors = dict(bucket.tensors())
        save_file(tensors, self._beside / _file_name(len(self._files), 0), metadata={"format": "pt"})
        self._files.append({name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()})

    def end(self) -> None:
        """Give the folder its name and have the servers load it."""
        for bucket in self.packer.flush():
            self._write(bucket)
        self.packer.close()
        count = len(self._files)
        names = {i: _file_name(i, count) for i in range(count)}
        for i, name in names.items():
            (self._beside / _file_name(i, 0)).rename(self._beside / name)
        index = {
            "metadata": {"total_size": sum(sum(sizes.values()) for sizes in self._files)},
            "weight_map": {tensor: names[i] for i, sizes in enumerate(self._files) for tensor in sizes},
        }
        (self._beside / "model.safetensors.index.json").write_text(json.dumps(index))
        folder = self.root / f"v{self._version}"
        shutil.rmtree(folder, ignore_errors=True)
        self._beside.rename(folder)
        self.has_sent = True
        self.server.reload_weights(str(folder))

    def finish(self, version: int) -> None:
        self.server.set_version(version)
        for old in self.root.iterdir():
            if old.name != f"v{version}":
                shutil.rmtree(old, ignore_errors=True)

    def close(self) -> None:
        self._dtype_name = None
        self.packer.close()
        shutil.rmtree(self._beside, ignore_errors=True)


def _file_name(index: int, count: int) -> str:
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"
