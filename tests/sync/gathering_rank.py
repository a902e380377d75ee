"""One trainer rank of the multi-rank sync test: `gathering_rank.py MECHANISM URL RUN_DIR NUM_SYNCS FAIL_FAST`.

A module sharded by FSDP2 is gathered tensor by tensor while it is sent. Version v sends weights filled by the formula
below, so that the other side can check them without seeing this process.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from agrpo.errors import ServerError
from agrpo.sync.control import ServerControl
from agrpo.sync.disk import Disk
from agrpo.sync.gloo import Gloo

SIZES = {"0": (7, 5), "1": (5, 3), "2": (3, 11)}


def weight(name: str, version: int) -> torch.Tensor:
    """[out, in] values that depend on the layer, the version and the place."""
    num_in, num_out = SIZES[name]
    return torch.arange(num_in * num_out, dtype=torch.float32).view(num_out, num_in) * version + int(name)


def main(mechanism: str, url: str, run_dir: str, num_syncs: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = torch.nn.Sequential(*[torch.nn.Linear(i, o, bias=False) for i, o in SIZES.values()])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    component = {"gloo": Gloo, "disk": Disk}[mechanism]()
    sender = component.open(ServerControl([url], 20.0), run_dir, torch.device("cpu"), rank, world_size)

    def gathered(version: int):
        for name, parameter in model.named_parameters():
            local = weight(name.split(".")[0], version)
            assert isinstance(parameter, DTensor)
            rows = local.chunk(world_size)
            shard = rows[rank] if rank < len(rows) else local[:0]
            parameter.to_local().data.copy_(shard)
            yield name, parameter.full_tensor()

    for version in range(1, num_syncs + 1):
        sender.send(gathered(version), version, dist.barrier)
    print(f"rank {rank} done", flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
    except ServerError as error:
        print(f"rank {os.environ['RANK']} {error}", flush=True)
        os._exit(4)
    os._exit(0)
