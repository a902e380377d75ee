"""One of two trainer ranks with a sharded adapter: python adapter_rank.py MODEL URL FOLDER RANK; writes FOLDER/seen<rank>.json."""

import gc
import json
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from agrpo.errors import ConfigError, ServerError
from agrpo.model.load import load_model
from agrpo.model.shard import open_mesh, shard
from agrpo.sections import Fsdp, Lora, Model, Rollout
from agrpo.sync.control import ServerControl
from agrpo.sync.disk import Disk
from agrpo.sync.proof import Proof
from agrpo.train.proof import prove
from agrpo.train.sender import open_sender


def main(path: str, url: str, folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", timedelta(seconds=60), 2, rank)
    section = Model(path=path, precision="no", lora=Lora(enabled=True, r=3), fsdp=Fsdp(enabled=True))
    torch.manual_seed(3)
    model = load_model(section, "cpu")
    shard(model, section, open_mesh(section, "cpu"))
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.fill_(0.03)
    server = ServerControl([url], 30.0)
    ranks = SimpleNamespace(rank=rank, world_size=2, is_first=rank == 0, device=torch.device("cpu"))
    seen = {}

    def opened(mode: str, **lora):
        model_section = Model(path=path, lora=Lora(enabled=True, **{"r": 3, **lora}))
        config = SimpleNamespace(model=model_section, rollout=Rollout(max_staleness=1), sync=Disk(mode=mode, verify_every=1))
        return open_sender(config, server, model, folder / mode, "start", ranks)

    sender = opened("lora")
    sender.session.send(sender.weights(), 1, dist.barrier)
    proof = Proof(server, model=None, prompt_ids=[5, 7], parity_limit=0.2, trainer_dtype="float32", rank=rank, world_size=2)
    seen["gap"] = prove(proof, model, 1, ranks.device, sender.name_of(1))
    # A failure of rank 0 is the same text on both; so is a refusal, and a fallback.
    sender.session.write = lambda folder, tensors: None
    try:
        sender.session.send(sender.weights(), 2, dist.barrier)
    except ServerError as error:
        seen["failure"] = str(error)
    sender.session.close()
    for name, options in (("rank", {"r": 500}), ("kind", {"options": {"use_dora": True}})):
        try:
            opened("lora", **options)
        except (ServerError, ConfigError) as error:
            seen[name] = f"{type(error).__name__}: {error}"
    merged = opened("auto", options={"use_dora": True})
    seen["fallback"] = [merged.prefix, type(merged.session).__name__]
    (folder / f"seen{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
    gc.freeze()  # the end looks through everything otherwise, which takes longer than a test's own work
