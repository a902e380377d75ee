"""Which GPUs there are, and who gets them."""

import dataclasses

import pytest

from agrpo.config import compose, read
from agrpo.config.devices import Devices, _visible, assumed
from tests.config.small import GPUS, SMALL


def test_devices_are_split_disjointly():
    run = read(compose(SMALL)).run
    assert GPUS.split(run, server_wants_gpu=True) == {"trainer": [2, 3], "server": [0, 1]}
    assert GPUS.split(run, server_wants_gpu=False) == {"trainer": [0, 1, 2, 3], "server": []}
    three = dataclasses.replace(run, num_processes=3)
    assert GPUS.split(three, server_wants_gpu=True) == {"trainer": [1, 2, 3], "server": [0]}
    assert Devices().split(run, True) == {"trainer": [], "server": []}
    given = dataclasses.replace(run, devices={"trainer": [0], "server": [3]})
    assert GPUS.split(given, True) == {"trainer": [0], "server": [3]}


def test_visible_devices_follow_the_drivers_rules():
    gpus = [("GPU-aaaa11", GPUS.gpus[0]), ("GPU-bbbb22", GPUS.gpus[1]), ("GPU-cccc33", GPUS.gpus[2])]
    assert [g.visible_id for _, g in _visible(gpus, "2,0")] == ["2", "0"]
    assert [g.visible_id for _, g in _visible(gpus, "GPU-bbbb22")] == ["1"]
    assert _visible(gpus, "") == [] and len(_visible(gpus, "0,9,1")) == 1


@pytest.mark.parametrize(
    ("tree", "count"),
    [
        ({}, 2),
        ({"run": {"num_processes": 3}, "server": {"tensor_parallel_size": 2}}, 5),
        ({"run": {"devices": {"server": [0], "trainer": [1, 6]}}}, 7),
        ({"run": {"devices": {"trainer": ["x", None], "server": 3}}, "server": None}, 2),  # faults that the checks name
        ({"run": {"devices": {"trainer": [10**9]}}}, 1024),
    ],
)
def test_a_plan_without_gpu_assumes_as_many_as_the_configuration_names(tree, count):
    assert len(assumed(tree)) == count and assumed(tree).assumed
