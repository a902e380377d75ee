"""One rank of a sharded run on CPU: python model_rank.py FOLDER RANK WORLD_SIZE; writes what rank 0 saw to FOLDER.

FOLDER/precision says the precision, or several folders in FOLDER each have their own and are trained one after the other;
where FOLDER/lora is there, an adapter is trained, and once more over bfloat16;
FOLDER/replicate is the number of copies of the sharded model.

Two rows a step: one per rank, or both on the one rank. The second row of the second step has no loss term.
"""

import dataclasses
import gc
import shutil
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from model_build import group, make_row, make_sample

from agrpo.loss.score_centering import ScoreCentering
from agrpo.model import checkpoint
from agrpo.model.load import load_model
from agrpo.model.moe import balance_of
from agrpo.model.optim import Updater
from agrpo.model.shard import open_mesh, shard
from agrpo.model.spread import open_model
from agrpo.model.terms import DeviceRow, token_terms
from agrpo.model.weights import checkpoint_names, full_tensors, gathered, parameters_by_name
from agrpo.sections import Fsdp, Lora, Model, Optimizer


class NoTokenizer:
    """Export writes the model alone."""

    def save_pretrained(self, path):
        pass


def steps_of_rows():
    first = [make_row(group(1, [7, 11, 13])), make_row([*group(2, [5, 3]), *group(3, [9, 4], group_id=1)])]
    second = [make_row(group(4, [5, 6])), make_row([make_sample([5, 6, 7, 8], 0)])]
    return [first, second]


def section_of(folder: Path, **more) -> Model:
    lora = {"lora": Lora(enabled=True, r=3, alpha=5.0)} if (folder / "lora").exists() else {}
    copies = folder / "replicate"
    options = {"replicate": int(copies.read_text())} if copies.exists() else {}
    given = {"fsdp": Fsdp(enabled=True, options=options), "precision": (folder / "precision").read_text(), **lora, **more}
    return Model(path=str(folder / "model"), **given)


def aux_share(model, terms, num_rows: int):
    """A row's share of the mean auxiliary loss of a step, as the training loop adds it."""
    return 0.0 if terms.aux_loss is None else balance_of(model).coefficient / num_rows * terms.aux_loss


def _without_weights(folder: Path, section: Model) -> Model:
    """Other ranks than the first get along with the configuration."""
    bare = folder / "bare"
    bare.mkdir(exist_ok=True)
    shutil.copy(folder / "model" / "config.json", bare)
    return dataclasses.replace(section, path=str(bare))


def over_bfloat16(folder: Path, rank: int, world_size: int) -> dict:
    """One update of a float32 adapter on frozen bfloat16 weights."""
    section = section_of(folder, dtype="bfloat16", precision="bf16")
    model = load_model(section, "cpu")
    shard(model, section, open_mesh(section, "cpu"))
    updater = Updater(model, Optimizer(learning_rate=1e-2), None)
    for row in steps_of_rows()[0][rank::world_size]:
        updater.backward(ScoreCentering()(token_terms(model, DeviceRow.of(row, "cpu"), 0.7, want_head=True)).sum())
    dtypes = sorted({(str(p.dtype), p.requires_grad) for p in model.parameters()})
    return {"norm": updater.step().grad_norm, "dtypes": dtypes}


def main(folder: Path, rank: int, world_size: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store{world_size}", timedelta(seconds=60), world_size, rank)
    for part in sorted(p.parent for p in folder.rglob("precision")):
        train(part, rank, world_size)
    dist.destroy_process_group()


def train(folder: Path, rank: int, world_size: int) -> None:
    section = section_of(folder)
    torch.manual_seed(11)  # the adapter's start, the same on every rank
    model = open_model(section if rank == 0 else _without_weights(folder, section), "cpu")
    updater = Updater(model, Optimizer(learning_rate=1e-2, max_grad_norm=0.05, weight_decay=0.1), None)
    trained = [(n, p) for n, p in parameters_by_name(model) if p.requires_grad]
    seen = {"losses": [], "norms": [], "grads": {}}
    for rows in steps_of_rows():
        total = sum(r.num_trained_tokens for r in rows)
        step_loss = torch.zeros(())
        for row in rows[rank::world_size]:
            terms = token_terms(model, DeviceRow.of(row, "cpu"), 0.7, want_head=True)
            loss = ScoreCentering()(terms).sum() / total + aux_share(model, terms, len(rows))
            updater.backward(loss)
            step_loss += loss.detach()
        dist.all_reduce(step_loss)
        if not seen["grads"]:
            seen["grads"] = {n: gathered(p.grad).clone() for n, p in trained}
            seen["dtypes"] = {str(p.dtype) for _, p in trained}
        seen["losses"].append(step_loss.item())
        seen["norms"].append(updater.step().grad_norm)
    seen["names"] = checkpoint_names(model)
    seen["weights"] = {n: t.clone() for n, t in full_tensors(model)}
    checkpoint.save(folder / f"checkpoints{world_size}" / "step-000002", model, updater, {"trainer.json": {"step": 2}})
    checkpoint.export(model, NoTokenizer(), folder / f"exported{world_size}", checkpoint.export_dtype(section))
    if section.lora.enabled:
        seen["bfloat16"] = over_bfloat16(folder, rank, world_size)
    if rank == 0:
        torch.save(seen, folder / f"seen{world_size}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    gc.freeze()  # the end looks through everything otherwise, which takes longer than a test's own work
