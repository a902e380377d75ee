"""The split planner: by hand, and on a pipeline that is played out step by step."""

import pytest

from agrpo.metrics.history import History
from agrpo.metrics.split import Split, measured, sentences


@pytest.mark.parametrize(
    "ratio, devices, percent",
    [(3, 2, 67), (3, 3, 89), (3, 4, 100), (5, 2, 60), (5, 4, 90), (5, 8, 90), (8, 2, 56), (8, 4, 84), (8, 8, 98), (2, 2, 75), (2, 4, 75), (2, 8, 94)],
)  # fmt: skip
def test_the_best_split_of_whole_devices_by_hand(ratio, devices, percent):
    """`ratio` device-seconds of generation for each of training: e.g. 3:1 on 3 devices, max(3/2, 1) against 4/3."""
    plan = Split(ratio / 1, 1 / (devices - 1), 0.0, 1, devices - 1)
    assert round(100 * plan.bound_s / plan.expected_s(*plan.best())) == percent


def test_the_sync_is_added_and_copies_of_several_devices_stay_whole():
    plan = Split(generation_s=6.0, training_s=2.0, sync_s=0.5, num_generation=2, num_training=6, server_size=2)
    assert plan.expected_s(2, 6) == 6.5 and plan.bound_s == (12 + 12) / 8 + 0.5
    assert plan.best() == (4, 4) and plan.expected_s(4, 4) == 3.5
    assert Split(6.0, 2.0, 0.0, 2, 6, server_size=4).best() == (4, 4)


def played_out(generation_s, training_s, sync_s, num_generation, num_training, lead=2, steps=40):
    """Records of a pipeline in which generation may be at most `lead` steps ahead; times in device-seconds per step."""
    ready, trained_at, now_generated, records = [], [0.0], 0.0, []
    for step in range(steps):
        may_start = trained_at[max(step - lead, 0)] if step >= lead else 0.0
        held = max(may_start - now_generated, 0.0)
        now_generated = max(now_generated, may_start) + generation_s / num_generation
        ready.append(now_generated)
        wait = max(ready[step] - trained_at[-1], 0.0)
        end = max(ready[step], trained_at[-1]) + training_s / num_training
        records.append({"step": step + 1, "perf/step_s": end - trained_at[-1] + sync_s, "perf/rollout_wait_s": wait,
                        "rollout/backpressure_s_per_step": held, "perf/weight_sync_s": sync_s})  # fmt: skip
        trained_at.append(end)
    return records


@pytest.mark.parametrize("generation_s, training_s", [(30.0, 10.0), (10.0, 30.0), (20.0, 20.0)])
def test_the_work_of_both_sides_is_found_in_the_records(generation_s, training_s):
    settings = {"run": {"devices": {"server": [0, 1], "trainer": [2, 3]}, "num_processes": 2}}
    plan = measured(History(played_out(generation_s, training_s, 0.5, 2, 2), settings))
    assert plan.generation_s * 2 == pytest.approx(generation_s) and plan.training_s * 2 == pytest.approx(training_s)
    better = plan.best()
    faster = played_out(generation_s, training_s, 0.5, *better)[-1]["perf/step_s"]
    assert faster == pytest.approx(plan.expected_s(*better))
    assert faster == pytest.approx(
        min(played_out(generation_s, training_s, 0.5, n, 4 - n)[-1]["perf/step_s"] for n in (1, 2, 3))
    )


def test_the_plan_in_words_ends_with_what_to_type():
    settings = {"run": {"devices": {"server": [0, 1], "trainer": [2, 3]}, "num_processes": 2}}
    lines = sentences(History(played_out(30.0, 10.0, 0.5, 2, 2), settings))
    assert "generation is busy for 15.00 s, training for 5.00 s" in lines[0]
    assert "15.50 s; 3 and 1 would take 10.50 s; no split of 4 devices is faster than 10.50 s" in lines[1]
    assert lines[2] == "'run.devices={server:[0,1,2],trainer:[3]}' run.num_processes=1"
    others = {"run": {"devices": {"server": [4, 5], "trainer": [6, 7]}, "num_processes": 2}}
    elsewhere = sentences(History(played_out(30.0, 10.0, 0.5, 2, 2), others))
    assert elsewhere[2] == "'run.devices={server:[4,5,6],trainer:[7]}' run.num_processes=1"
    balanced = sentences(History(played_out(20.0, 20.0, 0.5, 2, 2), settings))
    assert len(balanced) == 2 and "the best split" in balanced[1]


def test_at_staleness_zero_the_sides_follow_each_other():
    """9 s on one device, then 1 s on three: 10 s, and 4.5 + 1.5 on two and two. Freely divided, (3 + sqrt 3)^2 / 4 = 5.6 s."""
    devices = {"server": [0], "trainer": [1, 2, 3]}
    settings = {"run": {"devices": devices, "num_processes": 3}, "rollout": {"max_staleness": 0}}
    record = {"perf/step_s": 10.0, "perf/rollout_wait_s": 9.0, "rollout/backpressure_s_per_step": 1.0}
    lines = sentences(History([{"step": i, **record} for i in range(5)], settings))
    assert "one side at a time) = 10.00 s; 2 and 2 would take 6.00 s; no split of 4 devices is faster than 5.60 s" in lines[1]
    on_cpu = {**settings, "run": {}}
    assert sentences(History([{"step": 1, **record}], on_cpu))[1].startswith("G + R + sync = 10.00 s")


def test_a_cpu_run_and_a_run_without_steps():
    cpu = sentences(History(played_out(3.0, 1.0, 0.1, 1, 1), {"run": {"devices": None, "num_processes": 1}}))
    assert cpu[1].startswith("max(G, R) + sync = 3.10 s") and len(cpu) == 2
    assert sentences(History([], {})) == []


@pytest.mark.parametrize("size", [1, 4])
def test_no_split_is_planned_for_servers_whose_devices_are_not_known(size):
    """One address may be one device or eight; what was measured is said all the same."""
    settings = {
        "run": {"devices": {"trainer": [0, 1]}, "num_processes": 2, "num_nodes": 3},
        "server": {"base_url": "http://a:1,http://b:2", "tensor_parallel_size": size},
    }
    history = History(played_out(30.0, 12.0, 0.5, 2, 6), settings)
    assert measured(history).num_training == 6
    lines = sentences(history)
    assert "generation is busy for 15.00 s, training for 2.00 s" in lines[0] and len(lines) == 2
    assert (
        lines[1].startswith("max(G, R) + sync = 15.50 s; no split is planned") and "http://a:1,http://b:2" in lines[1]
    )


def test_a_sync_every_few_steps_counts_with_its_share_of_each():
    """Steps of 4 s of training, a sync of 4 s after every fourth: 5 s each in the mean."""
    records = [
        {
            "step": i + 1,
            "perf/step_s": 8.0 if i % 4 == 3 else 4.0,
            **({"perf/weight_sync_s": 4.0} if i % 4 == 3 else {}),
        }
        for i in range(41)
    ]
    settings = {"run": {"num_processes": 1}, "sync": {"every_steps": 4}}
    plan = measured(History(records[-9:], settings))  # two whole rounds, and the first record that is left out
    assert (plan.sync_s, plan.training_s, plan.generation_s) == (1.0, 4.0, 4.0)
