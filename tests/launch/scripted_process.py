"""A process of a run that follows a script instead of training: `python scripted_process.py NAME RUN_DIR SCRIPT PORT`.

Real processes, signs of life, exit records and logs; only the work is left out.
"""

from __future__ import annotations

import http.server
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path

from agrpo.errors import ContractError, StallError
from agrpo.lifecycle import Life, run_process, write_atomic
from agrpo.wire import WireError


def train(run_dir: Path, life: Life, num_steps: int) -> None:
    """Steps of 0.1 s; SIGTERM ends after the running one, with a checkpoint."""
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: asked.set())
    step = 0
    with (run_dir / "metrics.jsonl").open("a") as metrics:
        while step < num_steps and not asked.is_set():
            step += 1
            life.done["steps"] += 1
            life.beat("training", step=step)
            time.sleep(0.1)
            record = {"step": step, "reward": step / 10, "loss": 0.0, "frac_reward_zero_std": 0.9}
            metrics.write(json.dumps(record) + "\n")
            metrics.flush()
    life.beat("saving a checkpoint")
    (run_dir / "checkpoints" / f"step-{step}").mkdir(parents=True, exist_ok=True)
    write_atomic(run_dir / "summary.json", json.dumps({"global_step": step}))
    (run_dir / "state" / "finish").touch()


def roll_out(run_dir: Path, life: Life) -> None:
    """Beats until the trainer is done; has a child process, as the scorer has."""
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True).start()
    while not (run_dir / "state" / "finish").exists():
        life.beat("generating")
        time.sleep(0.05)


def hang(run_dir: Path, life: Life) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    life.beat("stuck in a collective")
    time.sleep(600)


def freeze(run_dir: Path, life: Life) -> None:
    life.beat("waiting for the trainer")
    time.sleep(600)


def wait(run_dir: Path, life: Life, phase: str) -> None:
    """Beats and never gets anywhere, as when each of two waits for the other."""
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: asked.set())
    while not asked.is_set():
        life.beat(phase)
        time.sleep(0.05)


def raise_contract(run_dir: Path, life: Life) -> None:
    life.beat("scoring")
    raise ContractError("reward pkg.mod.length returned 7 values for 8 completions")


def close_first(run_dir: Path, life: Life) -> None:
    """Closes its connection, and then takes a while to end."""
    life.beat("generating")
    (run_dir / "state" / "closed").touch()
    time.sleep(2.0)
    raise StallError("rollout.progress_timeout=6: 4 groups are being scored")


def lose_peer(run_dir: Path, life: Life) -> None:
    while not (run_dir / "state" / "closed").exists():
        life.beat("waiting for samples")
        time.sleep(0.05)
    raise WireError("the rollout process closed the connection")


def serve(port: int, status: int, is_labelled: bool, sick: Path) -> None:
    """Answers with 503 while the file `sick` is there, as vLLM does whose engine is gone."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            now = 503 if sick.exists() else status
            self.send_response(404 if not is_labelled and self.path != "/health" else now)
            self.end_headers()
            if self.path == "/weight_info":
                self.wfile.write(b'{"weight_version": "3"}')

        do_POST = do_GET

        def log_message(self, *args: object) -> None:
            pass

    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


def main(name: str, run_dir: Path, script: str, port: int) -> int:
    if name == "server":
        # Like vLLM: a process of its own beside it, no parent-death signal, no exit record.
        if os.fork() == 0:
            time.sleep(600)
        print("INFO 11-30 06:39:27 [loader.py:7] Loading shards")
        if script != "foreign":
            Life(run_dir, name).beat("serving")
        serve(port, 503 if script == "unhealthy" else 200, script == "labelled", run_dir / "sick")
    bodies = {
        "train": lambda r, life: train(r, life, 10),
        "train_on": lambda r, life: train(r, life, 10**6),
        "roll_out": roll_out,
        "hang": hang,
        "freeze": freeze,
        "await_samples": lambda r, life: wait(r, life, "waiting for samples"),
        "await_trainer": lambda r, life: wait(r, life, "waiting for the trainer"),
        "contract": raise_contract,
        "close_first": close_first,
        "lose_peer": lose_peer,
    }
    return run_process(name, run_dir, bodies[script])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
