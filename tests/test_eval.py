"""What rewards come to, by hand and by counting every draw; which evaluations are refused."""

import asyncio
import contextlib
import dataclasses
import itertools
import math
from types import SimpleNamespace as Bag

import numpy as np
import pytest

from agrpo.config import Devices, check, compose
from agrpo.data.hub import Hub
from agrpo.data.none import NoData
from agrpo.errors import ConfigError
from agrpo.eval import NO_LENGTH, Evaluation, mean_and_ci95, pass_at
from agrpo.rollout.__main__ import open_evaluations
from agrpo.types import Prompt, Rollout, Turn


@pytest.mark.parametrize(("n", "c", "k", "value"), [(5, 2, 1, 0.4), (5, 2, 2, 0.7), (5, 2, 3, 0.9), (5, 2, 4, 1), (7, 0, 3, 0), (7, 7, 1, 1)])
def test_pass_at_k_by_hand_and_by_counting_every_draw(n, c, k, value):
    assert pass_at(n, c, k) == pytest.approx(value)
    passed = [i < c for i in range(n)]
    draws = [any(draw) for draw in itertools.combinations(passed, k)]
    assert pass_at(n, c, k) == pytest.approx(sum(draws) / len(draws))


def test_the_interval_is_that_of_the_normal_approximation_over_prompts():
    # Deviations from 0.6 squared: 0.36, 0.01, 0.16, 0.16, 0.01; variance 0.7 / 4; 1.96 * sqrt(0.175 / 5).
    mean, half = mean_and_ci95([0.0, 0.5, 1.0, 1.0, 0.5])
    assert mean == pytest.approx(0.6) and half == pytest.approx(0.366682, abs=1e-6)
    assert mean_and_ci95([0.25])[0] == 0.25 and math.isnan(mean_and_ci95([0.25])[1]) and math.isnan(mean_and_ci95([])[0])


def test_figures_of_prompts_with_unequal_numbers_of_scored_rollouts():
    evaluation = Evaluation(data=None, num_rollouts=3, pass_reward=0.5, pass_at=[1, 3])
    found = evaluation.figures([[1.0, 0.0, 0.0], [0.5, 1.0], []])
    assert found["reward"] == pytest.approx((1 / 3 + 0.75) / 2)
    assert (found["rollouts_count"], found["prompts_count"]) == (5, 2)
    assert found["pass_at_1"] == pytest.approx((1 / 3 + 1) / 2)
    assert found["pass_at_3"] == 1.0  # the second prompt has no three rollouts to draw from


def rollout_of(version, reward=None, failure=None):
    none = np.zeros((3, 0), np.float32)
    ids, versions = np.arange(3, dtype=np.int32), np.asarray(version, np.int32)
    turn = Turn(ids, ids, np.zeros(3, np.float32), np.ones(3, bool), versions, none, none, None, "stop")
    return Rollout(() if failure else (turn,), [], rewards={} if reward is None else {"points": reward}, failure=failure)


def evaluated(rollouts):
    """The result of an evaluation at version 4 with one of `rollouts` per prompt."""

    class Prompts:
        def __len__(self):
            return len(rollouts)

        def prompt_of(self, index):
            return Prompt(index, 0, [], {})

    async def play(prompt, group_id, slot):
        return rollouts[prompt.row_index]

    async def score(group):
        return group

    return asyncio.run(Evaluation(data=None).run(Prompts(), play, score, 4))


def test_a_result_is_of_one_version_or_there_is_none():
    result = evaluated([rollout_of([4, 4, 4], 1.0), rollout_of([4, 4, 4], 0.0), rollout_of([], failure="timeout")])
    assert (result["reward"], result["version"], result["failed_count"]) == (0.5, 4, 1)
    assert evaluated([rollout_of([4, 4, 4], 1.0), rollout_of([4, 4, 5], 0.0)]) == {}
    assert evaluated([rollout_of([3, 3, 3], 1.0)]) == {}
    assert evaluated([rollout_of([4, 4, 4], 1.0), rollout_of([], failure="stale")]) == {}


def problems_of(evaluation):
    config, _ = check(compose(["+recipe=quickstart"]), Devices())
    return evaluation.problems(dataclasses.replace(config, run=dataclasses.replace(config.run, max_steps=None)))


def test_data_without_a_length_need_a_number_of_prompts(tmp_path):
    """Neither they nor a source that does not say so are evaluated on no prompt at all; nor do they need run.max_steps."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": [{"role": "user", "content": "2 + 2"}]}\n')
    stream = Hub(path=str(tmp_path / "rows.jsonl"), streaming=True)
    assert problems_of(Evaluation(data=stream)) == [NO_LENGTH]
    assert problems_of(Evaluation(data=stream, max_prompts=3)) == []
    assert problems_of(Evaluation(data=NoData()))[-1] == NO_LENGTH
    own = Bag(open=lambda needs_prompt: iter([]))
    config = Bag(env=Bag(), rollout=Bag(workflow=None), eval={"held": Evaluation(data=own)})
    with pytest.raises(ConfigError, match="eval.held.max_prompts must be set"):
        asyncio.run(open_evaluations(config, contextlib.AsyncExitStack()))


def test_k_must_not_exceed_the_rollouts():
    data = Bag(problems=lambda config: [], open=None)
    assert problems_of(Evaluation(data=data, num_rollouts=4, pass_at=[1, 4])) == []
    (line,) = problems_of(Evaluation(data=data, num_rollouts=2, pass_at=[1, 4]))
    assert line == "pass_at must hold numbers from 1 to num_rollouts=2, got [1, 4]"
