"""When an evaluation is asked for and what becomes of the syncs that fall due while it runs, over a real wire."""

import json
import threading
import time
from types import SimpleNamespace as Bag

import pytest

from agrpo import wire
from agrpo.errors import StallError
from agrpo.eval import Evaluation
from agrpo.train import evaluation
from agrpo.train.evaluation import Evaluations
from agrpo.train.ranks import Ranks
from tests.train.test_train_feeder import RolloutEnd, make_feeder, make_group, next_step, wait_until

RESULT = {"reward": 0.5, "version": 1}


def test_results_of_steps_that_are_made_again_leave_the_file(tmp_path):
    path = tmp_path / evaluation.FILE_NAME
    record = evaluation.EvaluationRecord(lambda message: None)
    for resumed, left in ((6, [0, 3, 6]), (5, [0, 3]), (0, [])):
        path.write_text("".join(json.dumps({"name": "held", "step": step}) + "\n" for step in (0, 3, 6, 9)) + '{"na')
        record.open(path, resumed)
        assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == left


def test_a_figure_that_is_no_number_is_null_in_the_file(tmp_path):
    record = evaluation.EvaluationRecord(lambda message: None)
    record.open(tmp_path / evaluation.FILE_NAME, 0)
    record.receive(wire.EvalResult("held", {"reward": 0.5, "reward_ci95": float("nan"), "version": 1}), lambda figures: None)
    line = json.loads(record.path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert line == {"name": "held", "reward": 0.5, "reward_ci95": None, "version": 1, "step": 0}


class Servers:
    """The trainer's side of the servers: what they hold, and whether one was started again."""

    def __init__(self, adapters=False):
        self.version, self.is_synced, self.num_resent, self.is_fresh = 1, True, 0, False
        self.sender, self.outage = Bag(prefix="run-v" if adapters else ""), Bag(is_over=lambda: self.is_fresh)

    def sync(self, feeder):
        self.version, self.is_synced = self.version + 1, True
        feeder.synced(self.version)

    def resend_weights(self):
        self.num_resent, self.is_fresh = self.num_resent + 1, False


class Part:
    """Feeder, rollout end, servers and the evaluations between them; `step` is a step with a sync due after it."""

    def __init__(self, path, max_staleness=1, adapters=False, timeout_s=0.6, **settings):
        self.feeder = make_feeder(path, max_staleness=max_staleness)
        self.feeder.evaluations.path = path / evaluation.FILE_NAME
        self.servers, self.is_stopped, self.beats = Servers(adapters), False, []
        held = {"held": Evaluation(data=None, **settings)}
        self.evaluations = Evaluations(
            held, Ranks(True, 1.0), self.servers, self.feeder, max_staleness, timeout_s, self.beats.append, lambda: self.is_stopped
        )
        self.end, self.index = RolloutEnd(self.feeder), 0
        assert self.feeder.await_rollout(10.0)

    def step(self, is_last=False):
        self.index += 1
        self.servers.is_synced = False
        if self.evaluations.lets_sync():
            self.servers.sync(self.feeder)
        self.evaluations.ask_due(self.index, is_last)

    def asked(self):
        return [(m.version, m.names, m.is_alone) for m in self.end.evaluations if isinstance(m, wire.RunEval)]

    def answer(self, result=RESULT):
        count = len(self.feeder.evaluations.running)
        self.end.run(self.end.link.send_eval("held", result))
        wait_until(lambda: len(self.feeder.evaluations.running) < count)


@pytest.fixture
def part(tmp_path, request):
    made = Part(tmp_path, **getattr(request, "param", {}))
    yield made
    made.end.run(made.end.link.close())  # first: the listener reads until its other end has closed
    made.feeder.close()


@pytest.mark.parametrize("part", [{"every": 2, "max_held_syncs": 2}], indirect=True)
def test_syncs_are_left_out_while_one_runs_and_then_it_is_given_up(part, tmp_path):
    part.step()
    assert part.servers.version == 2 and not part.asked()
    part.step()
    wait_until(lambda: part.asked() == [(3, ["held"], False)])
    part.step()
    assert part.servers.version == 3  # left out
    part.answer({**RESULT, "version": 3})
    part.step()  # due again, and the servers get weights first
    assert part.servers.version == 4
    wait_until(lambda: part.asked()[1:] == [(4, ["held"], False)])
    for _ in range(3):
        part.step()
    assert part.servers.version == 5  # the third sync was sent all the same
    wait_until(lambda: isinstance(part.end.evaluations[-1], wire.StopEval))
    part.answer({})
    window = part.feeder.take_window()
    assert window.total("perf/held_sync_count") == 3 and window.total("eval/held/given_up_count") == 1
    (line,) = (tmp_path / evaluation.FILE_NAME).read_text().splitlines()
    assert json.loads(line) == {"name": "held", "reward": 0.5, "version": 3, "step": 2}


@pytest.mark.parametrize("part", [{"every": 1, "at_end": True}], indirect=True)
def test_two_results_in_one_window_are_both_kept_and_the_end_is_not_evaluated_twice(part):
    part.step()
    wait_until(lambda: part.asked() == [(2, ["held"], False)])
    part.answer({"reward": 0.25, "version": 2})
    part.step()
    wait_until(lambda: len(part.asked()) == 2)
    part.step()  # due again while that one runs
    part.answer({"reward": 0.75, "version": 3})
    ((step, earlier),) = part.feeder.evaluations.take_earlier()
    window = part.feeder.take_window()
    assert (step, earlier.get("eval/held/reward"), earlier.get("eval/held/step")) == (1, 0.25, 1)
    assert (window.get("eval/held/reward"), window.get("eval/held/step")) == (0.75, 2) and not part.feeder.evaluations.take_earlier()
    part.step(is_last=True)
    assert len(part.asked()) == 2  # step 3's is left to the end


@pytest.mark.parametrize("part", [{"every": 2}], indirect=True)
def test_a_left_out_sync_lowers_the_version_that_later_steps_are_trained_at(part):
    """Staleness 1, three samples a step: step 3 would be trained at version 3, and is trained at 2 without the sync."""
    part.end.send(make_group(0, 1), make_group(1, 1))
    part.feeder.trained(next_step(part.feeder))
    part.servers.sync(part.feeder)
    part.feeder.held()
    part.end.send(make_group(2, 1), make_group(3, 2))
    assert next_step(part.feeder).index == 2
    assert next_step(part.feeder).index == 3  # samples of version 1 at age 1, not dropped at age 2
    assert part.feeder.take_window().total("sample/dropped_stale_count") == 0


@pytest.mark.parametrize("part", [{"every": 1, "max_staleness": 0}], indirect=True)
def test_training_that_allows_no_old_samples_waits_for_the_evaluation(part):
    part.step()
    wait_until(lambda: part.asked())
    threading.Timer(0.4, part.answer).start()
    began = time.monotonic()
    part.step()
    assert time.monotonic() - began > 0.3 and part.servers.version == 3 and part.beats
    # A server that was started again cannot answer before it gets weights; what ran then has no result.
    part.servers.is_fresh = True
    part.step()
    assert part.servers.version == 4
    part.answer()
    assert part.feeder.take_window().total("eval/held/given_up_count") == 1


@pytest.mark.parametrize("part", [{"every": 1, "adapters": True, "max_staleness": 2, "max_held_syncs": 1}], indirect=True)
def test_versions_that_are_adapters_are_sent_beside_the_one_that_is_evaluated(part):
    part.step()
    wait_until(lambda: part.asked() == [(2, ["held"], False)])
    part.step()
    part.step()
    assert part.servers.version == 4
    part.step()  # the adapter of version 2 would be unloaded
    assert part.servers.version == 4
    part.step()
    assert part.servers.version == 5


@pytest.mark.parametrize("part", [{"every": 1}], indirect=True)
def test_weights_sent_again_under_an_old_label_void_what_runs(part):
    part.step()
    wait_until(lambda: part.asked())
    part.step()  # left out: the trainer is a step ahead of the label
    part.evaluations.resend()
    part.answer()
    window = part.feeder.take_window()
    assert window.total("eval/held/given_up_count") == 1 and window.get("eval/held/reward") is None


@pytest.mark.parametrize("part", [{"every": 2}], indirect=True)
def test_the_end_waits_for_what_runs_then_for_the_last_and_only_while_the_rollout_process_lives(part):
    part.step()
    part.step(is_last=True)  # left to the evaluation at the end
    threading.Timer(0.9, part.answer).start()
    for i in range(1, 4):
        threading.Timer(0.25 * i, lambda: part.end.run(part.end.link.send_metrics({}))).start()
    part.evaluations.finish(["held"], 2)
    assert part.asked() == [(3, ["held"], True)]
    with pytest.raises(StallError, match="sent nothing for 1 s during the final evaluation of held"):
        part.evaluations.finish(["held"], 2)


@pytest.mark.parametrize("part", [{"at_end": True}], indirect=True)
def test_a_signal_ends_the_wait_for_the_last_evaluation(part):
    """A run whose machine is taken away has a minute or less, and its model is saved already."""
    threading.Timer(0.3, lambda: setattr(part, "is_stopped", True)).start()
    part.evaluations.finish(["held"], 2)
    assert part.asked() == [(1, ["held"], True)]
    wait_until(lambda: any(isinstance(m, wire.StopEval) for m in part.end.evaluations))
