"""Evaluation beside training: wall time of steps with evaluations over that of steps without, at equal generation load.

As `overlap`: the real rollout process, feed and evaluations, a stub server of a known rate, a trainer that only sleeps. One
run, in turns of ten steps: without, then with two evaluations of 64 answers each; meanwhile the server is faster by just
their tokens over the seconds of the turn before, so that as much is left for training. Syncs that fall due while one runs
are left out. Bar: at most 1.05, with every result of one version and none given up.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace as Bag

from agrpo.train.evaluation import FILE_NAME, Evaluations
from agrpo.train.ranks import Ranks
from tests.bench.overlap import SAMPLES_PER_STEP, TOKENS, TOKENS_PER_S, WARM_UP, measure
from tests.stub_server import control, stub_server

TURN, PAIRS = 10, 3  # steps of a turn, turns of each kind
ASKED_AT = (1, 5)  # steps of a turn, counted from 1
LIMIT = 1.05


class InTurns:
    """What the trainer does after a step, with a sync that takes no time; switches evaluations and the server's rate."""

    def __init__(self, url: str, config, feeder):
        self.url, self.feeder, self.walls, self.began = url, feeder, {False: 0.0, True: 0.0}, 0.0
        self.trainer = Bag(version=1, is_synced=True, sender=Bag(prefix=""), outage=Bag(is_over=lambda: False))
        ranks, staleness = Ranks(True, 1.0), config.rollout.max_staleness
        feeder.evaluations.path = Path(config.run.output_dir) / FILE_NAME
        self.evaluations = Evaluations(
            config.eval, ranks, self.trainer, feeder, staleness, 60.0, lambda phase: None, lambda: False
        )

    def __call__(self, step: int) -> None:
        turn, place = divmod(step - WARM_UP, TURN)
        now, is_beside = time.perf_counter(), turn % 2 == 1
        if step > WARM_UP:
            # The step that just ended belongs to the turn before where a new one begins.
            self.walls[is_beside if place else not is_beside] += now - self.began
        self.began = now
        if step >= WARM_UP and place == 0:
            control(self.url, tokens_per_s=self.rate(turn))
        self.trainer.is_synced = False
        if self.evaluations.lets_sync():
            self.trainer.version, self.trainer.is_synced = self.trainer.version + 1, True
            self.feeder.synced(self.trainer.version)
        self.evaluations.ask_due(int(not (is_beside and step > WARM_UP and place in ASKED_AT)), is_last=False)

    def rate(self, turn: int) -> float:
        """Of the server. Not by shares of a step: how many samples make one is the planner's choice."""
        if turn % 2 == 0:
            return TOKENS_PER_S
        turn_s = self.walls[False] / (turn // 2 + 1)
        return TOKENS_PER_S + len(ASKED_AT) * SAMPLES_PER_STEP * TOKENS / turn_s


def run() -> list[dict]:
    with tempfile.TemporaryDirectory() as name, stub_server(tokens=TOKENS, heads=8, bodies=16, versions=0) as url:
        control(url, tokens_per_s=TOKENS_PER_S)
        folder, made = Path(name), []
        settings = f"every: 2, at_start: false, num_rollouts: 4, max_prompts: {SAMPLES_PER_STEP // 4}"
        data = f"{{_target_: agrpo.data.jsonl.Jsonl, path: {folder}/data.jsonl}}"
        evaluation = f"+eval.held={{_target_: agrpo.eval.Evaluation, data: {data}, {settings}}}"

        def sync(config, feeder):
            made.append(InTurns(url, config, feeder))
            return made[0]

        # Two steps' samples in flight, so that an evaluation does not stand behind many in the server's own queue.
        extra = (evaluation, f"rollout.max_concurrent_rollouts={2 * SAMPLES_PER_STEP}")
        measure(folder, url, extra, sync, 2 * PAIRS * TURN)
        results = [json.loads(line) for line in (folder / "run" / FILE_NAME).read_text().splitlines()]
    ratio, expected = made[0].walls[True] / made[0].walls[False], len(ASKED_AT) * PAIRS
    is_whole = len(results) == expected == len({r["version"] for r in results})
    return [
        {"bar": "evaluation_beside_training", "value": round(ratio, 4), "unit": "ratio", "limit": LIMIT, "ok": ratio <= LIMIT},
        {"bar": "evaluations_with_result", "value": len(results), "unit": "count", "limit": expected, "ok": is_whole},
    ]
