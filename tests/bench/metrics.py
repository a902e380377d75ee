"""Metrics and console: what they cost per step of the quickstart, as a share of the time of its steps.

A short real run gives the records and the median time of a step; then everything that measures, reduces, writes and shows
a step is done again on it, in this process: the events of its groups, the figures of the loss, the record, the console.
"""

from __future__ import annotations

import io
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
STEPS, REPEATS, HEADS = 12, 50, 8
LIMIT = 0.01


def run() -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        records = _quickstart(Path(folder))
        # The first step waits for the server and for the evaluation before it.
        step_s = statistics.median(r["perf/step_s"] for r in records[1:])
        costs = {
            "rollout": _rollout_side(records),
            "loss": _loss_figures(records),
            "record": _record(records, Path(folder)),
            "console": _console(records, Path(folder), step_s),
        }
    bars = [_bar("metrics_share_of_step", sum(costs.values()) / step_s, LIMIT)]
    return bars + [_bar(f"metrics_share_{name}", cost / step_s, None) for name, cost in costs.items()]


def _bar(name: str, value: float, limit: float | None) -> dict:
    ok = limit is None or value <= limit
    return {"bar": name, "value": round(value, 5), "unit": "share of step time", "limit": limit, "ok": ok}


def _quickstart(folder: Path) -> list[dict]:
    from agrpo.metrics.sinks import read_records

    command = [sys.executable, "-m", "agrpo", "train", "+recipe=quickstart", f"run.max_steps={STEPS}", "~eval.heldout"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    out = subprocess.run(
        [*command, f"run.output_dir={folder}/run"], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=400
    )
    if out.returncode:
        raise RuntimeError(out.stdout + out.stderr)
    return [r for r in read_records(folder / "run") if "perf/step_s" in r]


def _mean(records: list[dict], name: str) -> int:
    return max(round(statistics.mean(r[name] for r in records)), 1)


def _timed(work, repeats: int = REPEATS) -> float:
    """Median seconds of one call."""
    work()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _rollout_side(records: list[dict]) -> float:
    """The events of all groups of a step, those without signal included, and the messages that carry them."""
    from agrpo.metrics.window import Window
    from agrpo.rollout import report
    from agrpo.rollout.tokens import TokenAccount
    from agrpo.types import Group, Prompt, Rollout, Turn
    from agrpo.wire.codec import Metrics, encode

    num_slots, length = 8, 4
    num_groups = round(sum(r["group/target_slot_count"] for r in records) / num_slots / len(records)) + 1
    zeros = np.zeros(length, np.int32)
    heads = np.zeros((length, HEADS), np.int32)

    def rollout(slot: int) -> Rollout:
        turn = Turn(
            zeros, zeros + slot, zeros.astype(np.float32), np.ones(length, bool), zeros, heads, heads.astype(np.float32), None, "stop"
        )  # fmt: skip
        return Rollout((turn,), [], rewards={"correct": float(slot % 2)}, duration_s=0.1)

    groups = [
        Group(i, Prompt(i, 0, [], {}), tuple(rollout(slot) for slot in range(num_slots)), 1) for i in range(num_groups)
    ]
    window = Window()
    account = TokenAccount(window)

    def work() -> None:
        for group in groups:
            account.open(group.group_id)
            for slot in range(num_slots):
                account.generated(group.group_id, slot, length)
            report.record_played(window, group, num_slots)
            report.record_scored(window, group, True, False)
            window.add("rewards/correct/call_s", 1e-4, 1)  # as the scorer does for each function
            report.record_trainable(window, num_slots, num_slots)
            account.dropped(group.group_id, "zero_std")
            account.record()
            encode(Metrics(window.to_wire()))

    return _timed(work)


def _loss_figures(records: list[dict]) -> float:
    import torch

    from agrpo.loss.score_centering import ScoreCentering
    from agrpo.metrics.window import Window
    from agrpo.model.terms import TokenTerms
    from agrpo.train.figures import LossFigures

    torch.set_num_threads(1)
    count, num_samples = _mean(records, "batch/trained_tokens_per_step"), _mean(records, "batch/samples_per_step")
    logprobs = torch.full((count,), -1.0)
    heads = torch.log_softmax(torch.randn(count, HEADS), -1)
    terms = TokenTerms(
        trainer_logprobs=logprobs,
        sampler_logprobs=logprobs - 0.01,
        advantages=logprobs,
        head_ids=torch.zeros(count, HEADS, dtype=torch.int32),
        head_trainer_logprobs=heads,
        head_sampler_logprobs=heads,
        entropy=-logprobs,
        sample_index=torch.arange(count) * num_samples // count,
        versions=torch.zeros(count, dtype=torch.int32),
        candidate_counts=None,
        num_samples=num_samples,
    )
    figures, loss, value, window = LossFigures(torch.device("cpu")), ScoreCentering(), torch.zeros(()), Window()

    def work() -> None:
        figures.add(loss, terms, value)
        figures.record(window, 1)

    return _timed(work)


def _record(records: list[dict], folder: Path) -> float:
    """Merge what each metric had, make the record, and write it."""
    from agrpo.metrics.diagnose import verdicts
    from agrpo.metrics.sinks import Jsonl
    from agrpo.metrics.window import Window

    (folder / "records").mkdir()
    sink, window = Jsonl(folder / "records"), Window()
    other = {name: [value, 1.0] for name, value in records[-1].items() if name != "step" and not isinstance(value, str)}

    def work() -> None:
        window.merge(other)
        window.merge(other)
        found = verdicts(window, 1, 128)
        sink.write(1, {**window.record(1), **found})

    cost = _timed(work)
    sink.close()
    return cost


def _console(records: list[dict], folder: Path, step_s: float) -> float:
    """Reading a record and drawing the live view as often as a step lasts."""
    from rich.console import Console as RichConsole

    from agrpo.metrics.console import REFRESHES_PER_S, Console

    output = RichConsole(file=io.StringIO(), width=80, height=24, force_terminal=True)
    console = Console(folder, max_steps=90, output=output)
    for step in range(1, 91):
        console.step({**records[-1], "step": step})

    def draw() -> None:
        output.print(console.render())

    return _timed(lambda: console.step(records[-1])) + _timed(draw) * REFRESHES_PER_S * step_s
