"""One job of the command line: check it, then show its plan or run it."""

from __future__ import annotations

import difflib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agrpo.config import Config, public
from agrpo.config import check as check_config
from agrpo.config.devices import Devices, assumed, detect
from agrpo.config.runner import NeedsAssumedDevices
from agrpo.env import resolve
from agrpo.errors import AgrpoError, ConfigError
from agrpo.launch.plan import is_managed, resolved
from agrpo.lifecycle import NO_SPACE, no_space
from agrpo.metrics import sinks
from agrpo.metrics.names import declared, metrics
from agrpo.metrics.output import say
from agrpo.rollout import loop_class
from agrpo.train import callbacks

if TYPE_CHECKING:
    from agrpo.config.runner import Job


# A server elsewhere, perhaps on GPUs, and a trainer here: both are taken as they stand, which may not be what was meant.
ON_CPU = (
    "planned for this machine, which has no GPU: the trainer runs on the CPU; for a machine with GPUs name them, for example "
    "'run.devices={trainer: [0, 1]}'"
)


def start(job: Job) -> float | None:
    """Plan or run one job. Returns the value of `run.objective`, which a sweeper minimises or maximises."""
    if job.dry_run:
        _preview(job)
        return None
    from agrpo.launch.supervisor import supervise

    config, warnings = check(job.tree, job.devices)
    config = resolved(config)
    if job.number is not None:
        say(f"job {job.number}: {' '.join(public(config, job.overrides))}")
    try:
        try:
            supervise(config, warnings, job.overrides, quiet=job.quiet)
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            raise no_space(error, Path(config.run.output_dir)) from error
    except AgrpoError as error:
        if job.number is not None:
            # The sweep goes on; its end reports only the first failure.
            say(f"job {job.number} failed: {error}")
        raise
    return _objective(config)


def check(tree: dict[str, Any], devices: Devices) -> tuple[Config, list[str]]:
    """Every check that needs no server, those of the logger and of the user's own code included."""

    def more(config: Config) -> list[str]:
        return [*sinks.problems(config.logger), *resolve.problems(config), *loop_class.problems(config), *callbacks.problems(config.run.callbacks)]

    config, warnings = check_config(tree, devices, more=more)
    return config, [*warnings, *_unknown_objective(config)]


def _unknown_objective(config: Config) -> list[str]:
    """A warning where no metric of agrpo has the name: the run's own code may log it, and a slip shows only at the end."""
    name = config.run.objective
    if name is None or declared(name) is not None:
        return []
    known = [m.name for m in metrics() if "{" not in m.name]
    known += [m.name.replace("{name}", own) for m in metrics() if m.name.startswith("eval/") for own in config.eval]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else "docs/metrics.md lists them"
    return [f"run.objective={name} is no metric of agrpo, only one that your own code logs; {hint}"]


def _preview(job: Job) -> None:
    from agrpo.launch.preview import preview

    config, warnings = planned(job)
    if job.devices and job.devices.assumed:
        warnings = warnings + _missing_here(job)
    elif not job.devices and not is_managed(config) and not config.run.use_cpu:
        warnings = [*warnings, ON_CPU]
    print(preview(resolved(config), warnings))


def planned(job: Job) -> tuple[Config, list[str]]:
    """As `check`; NeedsAssumedDevices where nothing but the lack of a GPU is wrong."""
    try:
        return check(job.tree, job.devices)
    except ConfigError as error:
        if job.devices or _same_faults(job, error.problems):
            raise
        raise NeedsAssumedDevices from error


def _same_faults(job: Job, problems: list[str]) -> bool:
    """Whether a machine with GPUs would have every one of these faults too."""
    try:
        check(job.tree, assumed(job.tree))
    except ConfigError as error:
        return set(problems) <= set(error.problems)
    return False


def _missing_here(job: Job) -> list[str]:
    """What keeps this job from running on this machine: the faults that the assumed machine does not have."""
    lines = [assumption(job.devices)]
    try:
        check(job.tree, detect())
    except ConfigError as error:
        lines += error.problems
    return lines


def assumption(devices: Devices) -> str:
    """The line that says what a plan made on a machine without GPU is for."""
    return f"planned for {len(devices)} GPUs of {devices.gpus[0].memory_mib // 1024} GiB: this machine has none"


def _objective(config: Config) -> float | None:
    name = config.run.objective
    if name is None:
        return None
    return objective(name, Path(config.run.output_dir))


def objective(name: str, run_dir: Path) -> float:
    """The last finite number that the run logged under this name. AgrpoError where there is none."""
    records = sinks.read_records(run_dir)
    values = [record[name] for record in records if name in record]
    numbers = [float(v) for v in values if isinstance(v, int | float) and math.isfinite(v)]
    if numbers:
        return numbers[-1]
    if values:
        raise AgrpoError(f"run.objective: {name} was never a finite number; it was last logged as {values[-1]!r}")
    names = sorted({key for record in records for key in record})
    raise AgrpoError(f"run.objective: no metric {name} was logged; logged: {', '.join(names) or 'nothing'}")
