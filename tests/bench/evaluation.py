"""Evaluation beside training: wall time of 30 steps with one every five, over that without, at equal generation load.

As `overlap`: the real rollout process, feed and evaluations, a stub server of a known rate, a trainer that only sleeps.
An evaluation asks for as many tokens as a step; the server of the run with evaluations is faster by just that, so that
as much is left for training. Syncs that fall due while one runs are left out. Bar: at most 1.05, with every result of one
version and none given up.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from types import SimpleNamespace as Bag

from agrpo.train.evaluation import FILE_NAME, Evaluations
from agrpo.train.ranks import Ranks
from tests.bench.overlap import SAMPLES_PER_STEP, STEPS, TOKENS, TOKENS_PER_S, WARM_UP, measure
from tests.stub_server import control, stub_server

EVERY = 5
LIMIT = 1.05


class BesideTraining:
    """What the trainer does after a step, with a sync that takes no time."""

    def __init__(self, config, feeder):
        self.feeder = feeder
        self.trainer = Bag(version=1, is_synced=True, sender=Bag(prefix=""), outage=Bag(is_over=lambda: False))
        staleness = config.rollout.max_staleness
        ranks, tell = Ranks(True, 1.0), lambda phase: None
        feeder.evaluations.path = Path(config.run.output_dir) / FILE_NAME
        self.evaluations = Evaluations(config.eval, ranks, self.trainer, feeder, staleness, 60.0, tell, lambda: False)

    def __call__(self, step: int) -> None:
        self.trainer.is_synced = False
        if self.evaluations.lets_sync():
            self.trainer.version, self.trainer.is_synced = self.trainer.version + 1, True
            self.feeder.synced(self.trainer.version)
        self.evaluations.ask_due(step, is_last=False)


def run() -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        alone, _ = _run(Path(folder) / "alone", TOKENS_PER_S, ())
        path = Path(folder) / "beside"
        settings = f"every: {EVERY}, at_start: false, num_rollouts: 4, max_prompts: {SAMPLES_PER_STEP // 4}"
        data = f"{{_target_: agrpo.data.jsonl.Jsonl, path: {path}/data.jsonl}}"
        evaluation = f"+eval.held={{_target_: agrpo.eval.Evaluation, data: {data}, {settings}}}"
        beside, results = _run(path, TOKENS_PER_S * (1 + 1 / EVERY), (evaluation,))
    ratio, expected = beside / alone, (WARM_UP + STEPS) // EVERY - 1  # the last one may still run at the end
    is_whole = len(results) >= expected and len({r["version"] for r in results}) == len(results)
    return [
        {"bar": "evaluation_beside_training", "value": round(ratio, 4), "unit": "ratio", "limit": LIMIT, "ok": ratio <= LIMIT},
        {"bar": "evaluations_with_result", "value": len(results), "unit": "count", "limit": expected, "ok": is_whole},
    ]


def _run(folder: Path, tokens_per_s: float, extra: tuple[str, ...]) -> tuple[float, list[dict]]:
    """Seconds per sample, and the results of the evaluations."""
    folder.mkdir()
    with stub_server(tokens=TOKENS, heads=8, bodies=16, versions=0) as url:
        control(url, tokens_per_s=tokens_per_s)
        wall, num_samples, _ = measure(folder, url, extra, BesideTraining)
    path = folder / "run" / FILE_NAME
    return wall / num_samples, [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
