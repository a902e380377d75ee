"""`agrpo serve`: the server of a configuration alone, in the foreground or as a line to paste."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from agrpo.config import Config
from agrpo.config.runner import NeedsAssumedDevices
from agrpo.errors import ConfigError
from agrpo.launch import job as jobs
from agrpo.launch import plan
from agrpo.metrics.output import say
from agrpo.serve.vllm import has_vllm

if TYPE_CHECKING:
    from agrpo.config.runner import Job
    from agrpo.serve.flags import ServerCommand


def commands(config: Config) -> list[ServerCommand]:
    """What to start for this configuration, one command per address; `config` is resolved."""
    if not hasattr(config.server, "standalone"):
        raise ConfigError(
            f"server={plan.option_name(config.server)} is started and stopped by agrpo train alone; choose server=vllm, "
            "or server=external for the line to run elsewhere"
        )
    devices = (config.run.devices or {}).get("server", [])
    # A server elsewhere has GPUs of its own, whose numbers are not known here.
    num_gpus = len(devices) or int(config.devices.has_gpu)
    visible = {"CUDA_VISIBLE_DEVICES": config.devices.visible_ids(devices)} if devices else {}
    found = config.server.standalone(Path(config.run.output_dir).absolute(), config, num_gpus)
    return [replace(command, environment=visible | command.environment) for command in found]


def lines(job: Job) -> list[str]:
    """The commands as lines for a shell; planned for an assumed machine where this one has no GPU and needs one.

    What is said of another machine goes to stderr, so that the lines can still be piped into a shell.
    """
    config, _ = jobs.planned(job)
    if getattr(config.server, "is_elsewhere", False) and not job.devices:
        # What runs there is not known here; machines that serve have GPUs, whatever the one that plans has.
        raise NeedsAssumedDevices
    if job.devices.assumed:
        sync = plan.option_name(config.sync)
        say(f"planned for a server and a trainer with GPUs, sync={sync}: this machine has none; give the run's sync=... if it is another")
    elif not job.devices:
        say("planned for a CPU build of vllm: this machine has no GPU")
    return [command.line() for command in commands(plan.resolved(config))]


def foreground(job: Job) -> Callable[[], None]:
    """A call that turns this process into the server: signals, terminal and exit code are then its own."""
    config, _ = jobs.check(job.tree, job.devices)
    found = commands(plan.resolved(config))
    if len(found) > 1:
        raise ConfigError(
            f"server.base_url names {len(found)} servers, and one runs in the foreground; give one address, or use --print"
        )
    command = found[0]
    python = shutil.which(command.argv[0])
    if python is None or not has_vllm(python):
        raise ConfigError(
            f"{command.argv[0]} has no package vllm; use --print where it is installed, or choose server=vllm "
            "server.python=PATH, the Python of an environment that has it"
        )
    environment = {**os.environ, **command.here()}

    def become() -> None:
        print(command.line(), file=sys.stderr, flush=True)
        os.execve(python, command.argv, environment)

    return become
