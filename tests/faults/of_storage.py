"""Disks: checkpoints that are cut off, damaged or of something else, and a disk that takes no more."""

from __future__ import annotations

import functools
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from rich.console import Console as RichConsole

from agrpo import wire
from agrpo.config import checkpoint_folder
from agrpo.metrics.console import Console
from agrpo.model import checkpoint
from agrpo.model.load import load_model
from agrpo.model.optim import Updater
from agrpo.rollout.completions import CompletionLog
from agrpo.sections import Model, Optimizer, Run
from agrpo.train.state import restore
from agrpo.types import Group, Prompt, Rollout
from tests.faults.table import Fault
from tests.standins import tiny_qwen3

ROOT = Path(__file__).parents[2]
LEDGER = {"resolved": [(0, 3)], "reasons": {}, "untrained_in_a_row": 0, "num_lines": 4}
ORDER, OTHER_ORDER = "data.shuffle=true with seed 42", "data.shuffle=true with seed 7"
SAVED = {
    "step": 2, "version": 2, "num_tokens": 0, "is_synced": True, "fingerprint": "mine", "order": ORDER, "ledger": LEDGER,
}  # fmt: skip


@functools.cache
def model_folder() -> Path:
    return tiny_qwen3(Path(tempfile.mkdtemp(prefix="agrpo-faults-")) / "model")


def close() -> None:
    if model_folder.cache_info().currsize:
        shutil.rmtree(model_folder().parent, ignore_errors=True)
        model_folder.cache_clear()


def parts(path: Path | None = None):
    model = load_model(Model(path=str(path or model_folder()), precision="no"), torch.device("cpu"))
    return model, Updater(model, Optimizer(learning_rate=1e-3), None)


def resumed(damage, folder: Path, order: str = ORDER, **run) -> str:
    """Two checkpoints, the second one spoilt."""
    model, updater = parts()
    for step in (1, 2):
        path = checkpoint.folder_of(folder / "checkpoints", step)
        files = {"rollout_state.json": {**SAVED, "step": step}, "ready_groups.bin": b"".join(map(wire.frame, ready()))}
        checkpoint.save(path, model, updater, files)
    section = Run(output_dir=str(folder), resume="auto", **run)
    fingerprint = damage(path) or "mine"
    found = checkpoint_folder.resumed(section.resume, folder)
    progress = restore(found, model, updater, section, fingerprint, order)
    waiting = f", {len(progress.ready)} groups wait" if progress.ready else ""
    return f"goes on at step {progress.step} with {progress.ledger['resolved'] if progress.ledger else 'no groups'}{waiting}"


def ready() -> list:
    import numpy as np

    from tests.train.recorded_groups import recorded_group

    return [recorded_group(np.random.default_rng(1), 7)]


def half(pattern: str, path: Path) -> None:
    file = max(path.glob(pattern), key=lambda p: p.stat().st_size)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def without(name: str, path: Path) -> None:
    target = path / name
    shutil.rmtree(target) if target.is_dir() else target.unlink()


def other_data(path: Path) -> str:
    return "another"


def other_model(folder: Path) -> None:
    model, updater = parts()
    path = checkpoint.folder_of(folder / "checkpoints", 1)
    checkpoint.save(path, model, updater, {"rollout_state.json": SAVED})
    other, other_updater = parts(tiny_qwen3(folder / "other", num_layers=3))
    restore(path, other, other_updater, Run(output_dir=str(folder), resume="auto"), "mine")


def no_checkpoint(folder: Path) -> None:
    model, updater = parts()
    (folder / "empty").mkdir()
    restore(folder / "empty", model, updater, Run(output_dir=str(folder), resume="x"), "mine")


def saver(folder: Path, *limit: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "tests.faults.saving", str(model_folder()), str(folder), *limit]
    return subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def killed_while_writing(folder: Path) -> str:
    """At a random moment; what is left must load."""
    process = saver(folder)
    try:
        assert process.stdout.readline() == "1\n", process.stderr.read()
        time.sleep(random.Random().uniform(0.1, 0.5))
    finally:
        process.kill()
        process.communicate()
    newest = checkpoint_folder.newest(folder / "checkpoints")
    model, updater = parts()
    files = checkpoint.load(newest, model, updater)
    return "the newest checkpoint loads" if files["n.json"] == int(newest.name[-6:]) else "mixed up"


def full(folder: Path) -> str:
    process = saver(folder, "100000")
    out, err = process.communicate(timeout=60)
    left = sorted(p.name for p in (folder / "checkpoints").iterdir())
    record = json.loads((folder / "state" / "trainer0.exit.json").read_text())
    assert "the disk takes no more" in record["reason"] and "the disk takes no more" in err, err
    return f"exit code {process.returncode}, left: {', '.join(left)}"


def exported(folder: Path) -> str:
    """The one before stays, nothing half-written is left beside it, and the line says what to do."""
    ending = child(f"from tests.faults.saving import export; export({str(model_folder())!r}, run_dir)", "/dev/null", folder)
    reason = json.loads((folder / "state" / "rollout.exit.json").read_text())["reason"]
    assert "the disk takes no more" in reason and "agrpo export" in reason, reason
    load_model(Model(path=str(folder / "model"), precision="no"), torch.device("cpu"))
    return f"{ending}, left: {', '.join(sorted(p.name for p in folder.glob('*model*')))}"


BODY = """
import resource, sys
from pathlib import Path
from agrpo.lifecycle import run_process
def body(run_dir, life):
    {body}
sys.exit(run_process("rollout", Path(sys.argv[1]), body))
"""


def child(body: str, stdout: str, folder: Path) -> str:
    """A process of a run whose log, or folder, lies on a disk that takes no more."""
    with open(stdout, "w") as log:
        process = subprocess.run(
            [sys.executable, "-c", BODY.format(body=body), str(folder)], stdout=log, stderr=log, timeout=20,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    return f"exit code {process.returncode}"


def completions(folder: Path) -> str:
    """A scored group whose text cannot be written."""
    (folder / "completions.jsonl").symlink_to("/dev/full")
    log = CompletionLog(folder / "completions.jsonl")
    rollout = Rollout((), [{"role": "assistant", "content": "5"}], rewards={"right": 1.0})
    log.write(Group(3, Prompt(0, 0, [{"role": "user", "content": "2 + 3"}], {}), (rollout,), 2), None, None)
    log.close()
    return "goes on without them"


def console(folder: Path) -> str:
    """What a run prints, to a file on a disk that takes no more."""
    with open("/dev/full", "w") as full, Console(folder, output=RichConsole(file=full)) as shown:
        shown.step({"step": 1, "reward": 0.5})
        shown.finish({}, {"model": folder / "model"})
    return "goes on unseen"


def halted(folder: Path) -> str:
    """What a run prints, to a reader that is there and reads nothing: a paused pager, a frozen connection."""
    reader, writer = os.pipe()
    with open(reader), open(writer, "w") as file, Console(folder, output=RichConsole(file=file)) as shown:
        for step in range(2000):
            shown.step({"step": step, "reward": 0.5, "loss": 0.25})
    return "goes on unseen"


def begun(folder: Path) -> str:
    """`agrpo train` where no file can take a byte."""
    process = subprocess.run(
        [sys.executable, "-m", "agrpo", "train", "+recipe=quickstart", f"run.output_dir={folder / 'run'}"], timeout=60, cwd=folder,
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)),
    )  # fmt: skip
    assert "could not be written: File too large; free space (df -h" in process.stderr and "Traceback" not in process.stderr, process.stderr
    return f"exit code {process.returncode}"


LOGS = "import logging; logging.basicConfig(); [logging.warning('x' * 99) for _ in range(99)]"
BEATS = "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); life.beat('generating')"
DAMAGED = "step-000002 is damaged.*run.resume=.*step-000001"
FAULTS = [
    Fault("checkpoint", "killed while writing", "the newest checkpoint loads", killed_while_writing, limit_s=90),
    Fault("checkpoint", "the disk is full", "exit code 4, left: step-000001", full, limit_s=90),
    Fault("export", "the disk is full", "exit code 4, left: model", exported, limit_s=90),
    Fault("logs", "the disk of the logs is full", "exit code 0", partial(child, LOGS, "/dev/full")),
    Fault("logs", "the disk of the run folder is full", "exit code 4", partial(child, BEATS, "/dev/null")),
    Fault("console", "its reader stops reading", "goes on unseen", halted),
    Fault("logs", "the disk is full before the run begins", "exit code 4", begun, limit_s=60),
    Fault("logs", "the disk of completions.jsonl is full", "goes on without them", completions),
    Fault("logs", "the disk of the console's output is full", "goes on unseen", console),
    *(Fault("resume", f"{what} cut in half", "exit code 3", partial(resumed, partial(half, pattern)), DAMAGED)
      for what, pattern in (
        ("weights", "shards/*.distcp"), ("ready groups", "ready_groups.bin"), ("state", "rollout_state.json"),
        ("optimizer state", "updater.json"), ("random state", "rng-0.pt"),
    )),
    Fault("resume", "rollout_state.json is missing", "goes on at step 2 with no groups",
          partial(resumed, partial(without, "rollout_state.json"))),
    Fault("resume", "the weights are missing", "goes on at step 1 with [[0, 3]], 1 groups wait",
          partial(resumed, partial(without, "shards"))),
    Fault("resume", "other data", "exit code 3", partial(resumed, other_data), "run.allow_dataset_change=true"),
    Fault("resume", "other data, allowed", "goes on at step 2 with []", partial(resumed, other_data, allow_dataset_change=True)),
    Fault("resume", "the same data in another order", "exit code 3", partial(resumed, lambda path: None, order=OTHER_ORDER),
          "the order of data.shuffle=true with seed 42, now .* seed 7; set the same again"),
    Fault("resume", "another model", "exit code 3", other_model, "damaged or belongs to another model"),
    Fault("resume", "a folder without checkpoint", "exit code 3", no_checkpoint, "is no checkpoint"),
]  # fmt: skip
