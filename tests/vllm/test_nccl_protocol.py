"""What the NCCL sender puts on the wire, read by vLLM's own receiver: no GPU, the broadcasts are recorded."""

from __future__ import annotations

import base64
import json
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from agrpo.sync.bucket import Packer
from agrpo.sync.nccl_wire import PackedTransport

pytestmark = pytest.mark.vllm

PACK_BYTES = 4096


class Answered:
    """An update call that has returned."""

    def done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> dict:
        return {}


class Recorder:
    """The server's control side and the communicator in one: keeps what either is told."""

    urls, timeout_s = ("http://recorded",), 10.0

    def __init__(self, folder: Path):
        self.folder, self.init_info, self.manifests, self.count = folder, {}, [], 0

    def dtype_name(self) -> str:
        return "bfloat16"

    def world_sizes(self) -> list[int]:
        return [1]

    def begin(self, path: str, bodies: list) -> list[Answered]:
        if path == "/init_weight_transfer_engine":
            self.init_info = bodies[0]["init_info"]
        else:
            self.manifests.append(json.loads(json.dumps(bodies[0]["update_info"])))
        return [Answered()]

    def start_update(self) -> None:
        pass

    def broadcast(self, flat: torch.Tensor, root: int) -> Recorder:
        (self.folder / f"{self.count}.bin").write_bytes(flat.numpy().tobytes())
        self.count += 1
        return self

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        pass


def test_vllm_reads_every_tensor_from_the_recorded_broadcasts(vllm_python, tmp_path):
    generator = torch.Generator().manual_seed(0)
    tensors = {f"w{i}": torch.randn(2 * i + 1, 31, generator=generator) for i in range(13)}
    tensors |= {
        "odd": torch.randn(3, generator=generator),
        "index": torch.arange(5, dtype=torch.int64),  # begins at an odd multiple of 2 unless it begins a bucket
        "transposed": torch.randn(11, 7, generator=generator).t(),
        "larger than a pack": torch.randn(101, 67, generator=generator),
        "scalar": torch.randn((), generator=generator),
        "exactly half a pack": torch.randn(PACK_BYTES // 4, generator=generator),
        "exactly a pack": torch.randn(PACK_BYTES // 2, generator=generator),
    }
    recorder = Recorder(tmp_path)
    packer = Packer(PACK_BYTES, "cpu", is_dense=True)
    transport = PackedTransport(recorder, packer, PACK_BYTES, lambda: bytes(range(128)), lambda *_: recorder)
    transport.connect()
    transport.start(1)
    for name, tensor in tensors.items():
        transport.send(name, tensor)
    transport.end()
    assert base64.b64decode(recorder.init_info["nccl_unique_id_b64"]) == bytes(range(128))
    (tmp_path / "record.json").write_text(
        json.dumps({"init_info": recorder.init_info, "manifests": recorder.manifests})
    )
    command = [vllm_python, str(Path(__file__).with_name("nccl_consumer.py")), str(tmp_path)]
    subprocess.run(command, check=True, timeout=240, cwd=tmp_path, env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)})
    loaded = load_file(tmp_path / "loaded.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        expected = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        assert torch.equal(loaded[name], expected), name
    assert recorder.count == len(recorder.manifests) > 5
