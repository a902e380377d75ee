"""What a run logs only once something happens: each of these is made to happen to the part that logs it."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest

from agrpo.env.toolbox import Toolbox
from agrpo.metrics.window import Window
from agrpo.model.terms import sequence_row
from agrpo.packer.flops import Flops, Training
from agrpo.sections import Concurrency
from agrpo.train.meter import Meter
from agrpo.types import Microbatch, Step
from tests import metric_list
from tests.rollout.loop_harness import TOKENS, Prompts, produce, until
from tests.stub_server import control, stub_server
from tests.train.test_train_feeder import RolloutEnd, make_feeder, make_group, wait_until

LOAD = """vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:num_requests_running{engine="0"} 3
vllm:num_requests_waiting{engine="0"} 2
vllm:num_preemptions_total{engine="0"} 7
"""
TOO_LONG = 5000  # tokens; the stub's context holds 4099


@pytest.fixture(scope="module")
def of_rollouts(tmp_path_factory):
    """A prompt that does not fit, a request that fails once and one that fails for good, equal rewards, a refusal."""
    folder = tmp_path_factory.mktemp("loop")

    async def scenario(trainer, loop):
        await until(lambda: trainer.num_done >= 10)
        control(url, metrics=LOAD.replace("total{engine=\"0\"} 7", "total{engine=\"0\"} 12"))
        await until(lambda: trainer.window.total("rollout/vllm_preemption_count") == 5)

    with stub_server(tokens=TOKENS, heads=2, bodies=11) as url:
        control(url, metrics=LOAD, faults=["500", "400", *["500"] * 2])
        trainer = produce(
            url, folder, scenario, prompts=Prompts({2: TOO_LONG}), max_retries=1, retry_wait_s=0.01, on_long_prompt="skip",
            reward=lambda group, slot: 1.0 if group % 3 == 0 else float(slot),
            accept=lambda group: group.group_id % 4 != 1, concurrency=Concurrency(poll_interval=0.05), max_failure_frac=1.0,
        )  # fmt: skip
    return trainer.window.record(1)


@pytest.fixture(scope="module")
def of_samples(tmp_path_factory):
    """One sample too old for its step, one longer than a row."""
    feeder = make_feeder(tmp_path_factory.mktemp("feeder"))
    end = RolloutEnd(feeder)
    end.send(make_group(0, 1), make_group(1, -5), make_group(2, 1, length=16))
    wait_until(lambda: end.credit is not None and end.credit.pulled_tokens == 15 + 15 + 48)
    feeder.close()
    return feeder.take_window().record(1)


def of_devices() -> dict:
    window, meter = Window(strict=True), Meter(Training(Flops(10.0, 100.0, 1.0)), 1, 1e6)
    meter.add(Step(1, (Microbatch((dataclasses.replace(sequence_row(np.arange(3))),)),)))
    meter.record(window, fwd_bwd_s=1.0, step_s=2.0)
    return window.record(1)


def of_tools() -> dict:
    toolbox, window = Toolbox({}, None, 1.0, {}), Window(strict=True)
    asyncio.run(toolbox.answer([{"function": {"name": "nobody_made_it", "arguments": "{}"}}]))
    for event in toolbox.summary(False):
        window.add(*event)
    return window.record(1)


def test_everything_that_can_happen_is_logged_with_values_of_its_unit(of_rollouts, of_samples):
    records = [of_rollouts, of_samples, of_devices(), of_tools()]
    assert metric_list.unlogged(records, "event") == [] and metric_list.unlogged(records, "gpu") == []
    assert metric_list.outside(records) == []


def test_each_is_counted_as_often_as_it_happened(of_rollouts, of_samples):
    assert of_rollouts["rollout/vllm_retry_count"] >= 1 and of_rollouts["rollout/failed_rejected_count"] == 1
    assert of_rollouts["rollout/skipped_prompt_count"] >= 1
    assert of_rollouts["reward_dropped"] == 1.0  # equal rewards of 1 are the only ones without signal
    assert of_rollouts["rollout/vllm_kv_cache_usage_frac"] == 0.25
    assert (of_rollouts["rollout/vllm_running_requests"], of_rollouts["rollout/vllm_queued_requests"]) == (3, 2)
    discarded = {name.rpartition("/")[2] for name in of_rollouts if name.startswith("tokens/discarded/")}
    assert "rejected" in discarded and of_rollouts["group/rejected_count"] >= 1 and of_rollouts["group/accepted_count"] >= 1
    assert (of_samples["sample/dropped_stale_count"], of_samples["batch/dropped_oversize_count"]) == (3, 3)
    assert of_samples["tokens/discarded/stale"] == 3 * 3 and of_samples["tokens/discarded/oversize"] == 3 * 14
