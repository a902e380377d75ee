"""What the tests of the configuration start from."""

from agrpo.config import check, compose
from agrpo.config.devices import Devices, Gpu
from agrpo.errors import ConfigError

# A complete configuration that needs no file, no network and no GPU.
SMALL = [
    "model.path=owner/some-model", "data=hub", "data.path=owner/some-data", "server=embedded",
    "scorer.functions=[agrpo.scorer.rewards.accuracy_reward]", "run.output_dir=/tmp/agrpo-test-never-made",
]  # fmt: skip
GPUS = Devices(tuple(Gpu(str(i), "test GPU", 81920, 9.0) for i in range(4)))


def problems(*overrides: str, devices: Devices = Devices()) -> list[str]:
    try:
        check(compose([*SMALL, *overrides]), devices)
    except ConfigError as error:
        return error.problems
    return []


def has(tree: dict, key: str) -> bool:
    """Whether the composed configuration has this key."""
    for part in key.split("."):
        if part not in tree:
            return False
        tree = tree[part]
    return True
