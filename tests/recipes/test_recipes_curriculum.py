"""The curriculum's rule by hand, and its configuration as it ships."""

import asyncio
from types import SimpleNamespace as Bag

import numpy as np

from agrpo.config import Devices, compose
from agrpo.launch.job import check
from agrpo.recipes.curriculum.loop import Curriculum


def test_solved_questions_are_skipped_until_the_next_look():
    loop = Curriculum()
    loop.config, loop._advantages = Curriculum.Config(), lambda group: group.rewards * 0
    asyncio.run(loop.setup())
    loop.compute_advantages(Bag(row_index=3, rewards=np.array([1.0, 1.0, np.nan])))
    loop.compute_advantages(Bag(row_index=4, rewards=np.array([1.0, 0.0, 1.0])))
    loop.compute_advantages(Bag(row_index=5, rewards=np.array([np.nan])))
    asked = [[row for row in (3, 4, 5) if loop.filter_prompt(row, {}, epoch)] for epoch in range(5)]
    assert asked == [[3, 4, 5], [4, 5], [4, 5], [4, 5], [3, 4, 5]]
    again = Curriculum()
    again.load_state_dict(loop.state_dict())
    assert again.pass_rates == {3: 1.0, 4: 2 / 3}


def test_the_recipe_is_accepted_with_and_without_the_loop(tmp_path):
    plain = ["+recipe=curriculum", f"run.output_dir={tmp_path}/run"]
    check(compose([*plain, "rollout.loop_config.pass_rate_cap=0.8"]), Devices())
    config, _ = check(compose([*plain, "rollout.loop=null"]), Devices())
    assert config.rollout.loop is None
