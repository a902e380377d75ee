"""The shipped YAML: every file has exactly its class's keys, every option composes, a configuration survives the disk."""

import dataclasses
from pathlib import Path

import pytest
import yaml

from agrpo.config import check, compose, detect, load, save, to_tree
from agrpo.config.build import GROUPS, locate, read_section
from agrpo.config.choices import conf_dir, options
from agrpo.sections import Checkpoint, Logger, Model, Optimizer, Rollout, Run
from tests.config.small import SMALL, problems

CONF = conf_dir()
SECTIONS = {"model": Model, "optimizer": Optimizer, "logger": Logger}
COMPONENT_FILES = sorted(p for g in GROUPS for p in (CONF / g).glob("*.yaml"))
SECTION_FILES = sorted(p for g in SECTIONS for p in (CONF / g).glob("*.yaml"))


def id_of(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


@pytest.mark.parametrize("path", COMPONENT_FILES, ids=id_of)
def test_a_component_file_has_exactly_the_fields_and_defaults_of_its_class(path):
    node = yaml.safe_load(path.read_text())
    cls = locate(node.pop("_target_"))
    assert cls.__module__.startswith(f"agrpo.{'serve' if path.parent.name == 'server' else path.parent.name}")
    _has_exactly_the_fields(node, cls)


@pytest.mark.parametrize("path", SECTION_FILES, ids=id_of)
def test_a_section_file_has_exactly_the_fields_of_its_section(path):
    node = yaml.safe_load(path.read_text())
    cls = SECTIONS[path.parent.name]
    assert set(node) == {f.name for f in dataclasses.fields(cls)}


@pytest.mark.parametrize(("name", "cls"), [("run", Run), ("rollout", Rollout), ("checkpoint", Checkpoint)])
def test_the_root_file_has_exactly_the_fields_and_defaults_of_each_fixed_section(name, cls):
    node = yaml.safe_load((CONF / "train.yaml").read_text())[name]
    node.pop("output_dir", None)
    _has_exactly_the_fields(node, cls, but=("output_dir",))


def _has_exactly_the_fields(node: dict, cls: type, but: tuple[str, ...] = ()) -> None:
    fields = {f.name: f for f in dataclasses.fields(cls) if f.name not in but}
    assert set(node) == set(fields)
    given = {k: v for k, v in node.items() if v != "???"}
    for name, value in given.items():
        result, found = read_section({name: value}, cls, "x")
        assert not [line for line in found if f"x.{name}" in line], found
        field = fields[name]
        default = field.default if field.default is not dataclasses.MISSING else field.default_factory()
        if result is not None:
            assert getattr(result, name) == default, name


@pytest.mark.parametrize("path", COMPONENT_FILES + SECTION_FILES + [CONF / "train.yaml"], ids=id_of)
def test_every_key_is_commented_in_its_file(path):
    for line in path.read_text().splitlines():
        if (
            line.strip()
            and not line.lstrip().startswith(("#", "_target_", "- ", "defaults:", "hydra:"))
            and line[-1] != ":"
        ):
            assert "#" in line or path.name == "train.yaml" and line.startswith("    "), line

COMPANIONS = {"dr_grpo": ["advantage.std_level=null"]}  # what an option refuses to go without


@pytest.mark.parametrize("group", [g for g in GROUPS if g not in ("data", "server")])
def test_every_option_composes_and_builds(group):
    for name in options(group):
        if name != "nccl":
            assert problems(f"{group}={name}", *COMPANIONS.get(name, ())) == [], name


def test_the_default_configuration_passes_and_survives_the_way_to_disk(tmp_path):
    config, _ = check(compose([*SMALL, f"run.output_dir={tmp_path}", "checkpoint.hub.token=secret"]), detect())
    save(config, tmp_path, ["a=1", "checkpoint.hub.token=secret", "checkpoint.hub={token: secret}"])
    again = load(tmp_path)
    assert to_tree(again) == to_tree(config)
    assert again.loss == config.loss and again.optimizer.learning_rate == 1e-6
    assert "secret" not in (tmp_path / "config.yaml").read_text()
