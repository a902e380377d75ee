"""A process that saves checkpoints: `saving.py MODEL FOLDER [LIMIT]`, forever, or until no file may be larger than LIMIT bytes."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

from agrpo.lifecycle import Life, run_process
from agrpo.model import checkpoint
from agrpo.model.load import load_model
from agrpo.model.optim import Updater
from agrpo.model.tokenizer import load_tokenizer
from agrpo.sections import Model, Optimizer


def main(model_path: str, run_dir: Path, limit: int | None, life: Life) -> None:
    model = load_model(Model(path=model_path, precision="no"), torch.device("cpu"))
    updater = Updater(model, Optimizer(learning_rate=1e-3), None)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    updater.step()
    step = 0
    while limit is None or step < 2:
        step += 1
        if limit is not None and step == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        checkpoint.save(checkpoint.folder_of(run_dir / "checkpoints", step), model, updater, {"n.json": step})
        checkpoint.prune(run_dir / "checkpoints", 2)
        print(step, flush=True)


def export(model_path: str, run_dir: Path) -> None:
    """The model's folder, where no file may be larger than 100,000 bytes; one of an earlier export is there."""
    section = Model(path=model_path, precision="no")
    model, tokenizer = load_model(section, torch.device("cpu")), load_tokenizer(section)
    checkpoint.export_merged(model, tokenizer, run_dir / "model", None)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    checkpoint.export_merged(model, tokenizer, run_dir / "model", None)


if __name__ == "__main__":
    path, folder = sys.argv[1], Path(sys.argv[2])
    allowed = int(sys.argv[3]) if len(sys.argv) > 3 else None
    sys.exit(run_process("trainer0", folder, lambda run_dir, life: main(path, run_dir, allowed, life)))
