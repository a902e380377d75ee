"""Settings of the sync group and what they refuse without a server."""

from __future__ import annotations

import dataclasses
import types

import pytest
import yaml
from test_sync_transfer import ROOT

from agrpo.schema import violations
from agrpo.sync.disk import Disk
from agrpo.sync.gloo import Gloo
from agrpo.sync.nccl import Nccl

COMPONENTS = {"gloo": Gloo, "disk": Disk, "nccl": Nccl}


@pytest.mark.parametrize("option", COMPONENTS)
def test_yaml_has_the_fields_of_its_class_with_their_defaults(option):
    node = yaml.safe_load((ROOT / "conf" / "sync" / f"{option}.yaml").read_text())
    component = COMPONENTS[option]
    assert node.pop("_target_") == f"{component.__module__}.{component.__name__}"
    assert node == dataclasses.asdict(component())


def test_out_of_range_settings_are_named():
    found = violations(Gloo(every_steps=0, mode="half", bucket_mb=0, verify_every=-1), "sync")
    assert found == [
        "sync.every_steps must be >= 1, got 0",
        "sync.mode must be one of auto, merged, lora, got 'half'",
        "sync.bucket_mb must be >= 1, got 0",
        "sync.verify_every must be >= 0, got -1",
    ]


def test_nccl_without_a_gpu_is_refused_with_what_works():
    model = types.SimpleNamespace(lora=types.SimpleNamespace(enabled=False))
    assert Nccl().problems(types.SimpleNamespace(devices=(), model=model)) == [
        "sync=nccl needs a GPU, none is visible; use sync=gloo or sync=disk"
    ]
    assert Nccl().problems(types.SimpleNamespace(devices=(0, 1), model=model)) == []
