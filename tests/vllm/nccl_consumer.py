"""Runs in vLLM's environment: its own NCCL receiving code over recorded bytes instead of a GPU's.

`nccl_consumer.py FOLDER`: reads `record.json` (init_info, manifests) and the broadcasts `0.bin`, `1.bin`, ...; writes
what vLLM would load to `loaded.safetensors`.
"""

import contextlib
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from vllm.distributed.weight_transfer import packed_tensor
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLWeightTransferEngine,
    NCCLWeightTransferInitInfo,
    NCCLWeightTransferUpdateInfo,
)


class Recorded:
    """vLLM's communicator, with the recorded broadcasts."""

    def __init__(self, folder: Path):
        self.folder, self.count = folder, 0

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        recorded = (self.folder / f"{self.count}.bin").read_bytes()
        assert src == 0 and tensor.dtype == torch.uint8 and tensor.numel() == len(recorded)
        tensor.copy_(torch.frombuffer(bytearray(recorded), dtype=torch.uint8))
        self.count += 1


class Model:
    def __init__(self):
        self.loaded = {}

    def load_weights(self, tensors) -> None:
        self.loaded |= {name: tensor.clone() for name, tensor in tensors}


class Stream:
    def synchronize(self) -> None:
        pass


def main(folder: Path) -> None:
    record = json.loads((folder / "record.json").read_text())
    init_info = NCCLWeightTransferInitInfo(**record["init_info"])
    assert len(init_info.nccl_unique_id_bytes) == 128
    # There are no streams without a GPU; everything else is vLLM's own code.
    packed_tensor._get_streams = lambda device, count: tuple(Stream() for _ in range(count))
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.accelerator.current_device_index = lambda: 0
    engine = NCCLWeightTransferEngine.__new__(NCCLWeightTransferEngine)
    engine.model, engine.device, engine.model_update_group = Model(), "cpu", Recorded(folder)
    engine.packed, engine.packed_num_buffers = init_info.packed, init_info.packed_num_buffers
    engine.packed_buffer_size_bytes = init_info.packed_buffer_size_bytes
    for manifest in record["manifests"]:
        engine.receive_weights(NCCLWeightTransferUpdateInfo(**manifest))
    assert engine.model_update_group.count == len(list(folder.glob("*.bin")))
    save_file(engine.model.loaded, folder / "loaded.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
