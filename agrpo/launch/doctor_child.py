"""`python -m agrpo.launch.doctor_child PART FOLDER`: one part of `agrpo doctor` that runs user code or starts something.

Findings go to FOLDER/PART.jsonl as they are made, so that what was found before a hang or a crash is not lost.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
import time
from pathlib import Path

from agrpo.config import Config, detect, load
from agrpo.errors import AgrpoError, ConfigError
from agrpo.launch.doctor_code import data, rewards, tools
from agrpo.launch.doctor_host import Finding
from agrpo.launch.doctor_step import server, step
from agrpo.lifecycle import die_with_parent


def main(part: str, folder: Path) -> int:
    die_with_parent()
    path, began = folder / f"{part}.jsonl", time.monotonic()

    def tell(finding: Finding) -> None:
        nonlocal began
        now = time.monotonic()
        timed = finding if finding.seconds else dataclasses.replace(finding, seconds=round(now - began, 3))
        began = now
        with path.open("a") as file:
            file.write(json.dumps(dataclasses.asdict(timed)) + "\n")

    try:
        {"data": data, "rewards": rewards, "tools": tools, "server": server, "step": step}[part](_loaded(folder), folder, tell)
    except AgrpoError as error:
        for line in error.problems if isinstance(error, ConfigError) else [str(error)]:
            tell(Finding(part, "fail", line))
        return 1
    return 0


def _loaded(folder: Path) -> Config:
    """The saved configuration with the devices of this machine, which are not saved."""
    config = load(folder)
    return config if config.run.use_cpu else dataclasses.replace(config, devices=detect())


if __name__ == "__main__":
    code = main(sys.argv[1], Path(sys.argv[2]))
    gc.freeze()  # as in agrpo.lifecycle: the end looks through everything otherwise
    sys.exit(code)
