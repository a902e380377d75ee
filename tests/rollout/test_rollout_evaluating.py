"""Evaluations beside generation: groups go on, the weights' version is one, and a change of weights ends them."""

import asyncio

from agrpo import wire
from agrpo.eval import Evaluation
from agrpo.rollout.evaluating import Opened
from tests.rollout.loop_harness import G, Prompts, Scripted, produce, until
from tests.stub_server import control, report


def test_groups_go_on_beside_an_evaluation_which_comes_first_and_has_its_own_sampling_and_rewards(url, tmp_path):
    evaluation = Evaluation(data=None, num_rollouts=2, temperature=0.25, max_completion_length=3, max_prompts=5, at_start=False)
    own = Scripted(lambda group, slot: 7.0 + slot)
    control(url, delay_s=0.05)

    async def scenario(trainer, loop):
        await until(lambda: len(trainer.ready) >= 2)
        trainer.listener.send(wire.RunEval(1, ["held"]))
        await until(lambda: trainer.evals)
        trainer.num_at_result = len(trainer.ready)
        await until(lambda: len(trainer.ready) > trainer.num_at_result + 1)

    trainer = produce(url, tmp_path, scenario, evaluations={"held": Opened(evaluation, Prompts(), own)}, cap=2 * G)
    (sent,) = trainer.evals
    assert sent.result["reward"] == 7.5 and sent.result["version"] == 1 and sent.result["rollouts_count"] == 10
    assert trainer.num_at_result > 2
    seen = [body["sampling_params"] for body in report(url)["seen"]]
    where = [i for i, params in enumerate(seen) if params["temperature"] == 0.25]
    assert len(where) == 10 and all(seen[i]["max_tokens"] == 3 for i in where)
    # First in line: what is in flight of groups gives its places to the evaluation until all of it has begun.
    assert where[-1] - where[0] < 10 + 2 * G


def test_an_evaluation_is_given_up_when_the_weights_change_and_the_loop_goes_on(url, tmp_path):
    evaluation = Evaluation(data=None, num_rollouts=2, max_prompts=5, at_start=False)

    async def scenario(trainer, loop):
        await until(lambda: len(trainer.ready) >= 1)
        control(url, delay_s=2.0)
        trainer.listener.send(wire.RunEval(1, ["held", "other"]))
        await asyncio.sleep(0.3)
        trainer.listener.send(wire.StopEval())
        await until(lambda: len(trainer.evals) == 2, 1.5)  # before any request in flight could have been answered
        control(url, delay_s=0)
        count = len(trainer.ready)
        await until(lambda: len(trainer.ready) > count)

    evaluations = {name: Opened(evaluation, Prompts()) for name in ("held", "other")}
    trainer = produce(url, tmp_path, scenario, evaluations=evaluations, cap=2 * G)
    assert [(e.name, e.result) for e in trainer.evals] == [("held", {}), ("other", {})]


def test_answers_of_other_weights_give_no_result(url, tmp_path):
    """The stub labels its answers 1, and the evaluation was asked at 2."""
    evaluation = Evaluation(data=None, max_prompts=3, at_start=False)

    async def scenario(trainer, loop):
        await until(lambda: trainer.ready)
        trainer.listener.send(wire.RunEval(2, ["held"]))
        await until(lambda: trainer.evals)

    assert produce(url, tmp_path, scenario, evaluations={"held": Opened(evaluation, Prompts())}).evals[0].result == {}
