"""From the command line to a composed configuration: this file and `overrides` alone know Hydra.

Hydra's own runner is used, so sweepers, launchers, `--cfg` and `--config-dir` work. What it says badly is said here:
unknown group options before it runs, unknown keys after (each override is added by force, and the reader of the tree
names all that do not exist), so that every fault of a command line is reported at once.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agrpo.config import choices
from agrpo.config.devices import Devices, assumed, detect
from agrpo.config.overrides import one_line, prepare, shown
from agrpo.errors import ConfigError

ROOT = "train"
# CFG-sync: the one default that depends on the machine; conf/train.yaml reads it from this variable.
SYNC_VARIABLE, DEFAULT_SYNC = "AGRPO_DEFAULT_SYNC", {"gpu": "nccl", "cpu": "gloo"}


class _Left(BaseException):
    """Carries a job's error past Hydra, which would print it in its own words."""

    def __init__(self, error: Exception):
        self.error = error


class NeedsAssumedDevices(Exception):
    """Raised where a job is only planned, needs a GPU and none is here: compose again for an assumed machine."""


@dataclass(frozen=True)
class Request:
    """What was asked on the command line."""

    overrides: list[str]
    dry_run: bool = False
    multirun: bool = False
    config_dir: str | None = None
    show: str | None = None  # Hydra's --cfg: job, hydra or all
    resolve: bool = False
    quiet: bool = False


@dataclass(frozen=True)
class Job:
    """One job of the request, as its task function gets it."""

    tree: dict[str, Any]  # the composed configuration, run.output_dir filled in, unchecked
    overrides: list[str]
    devices: Devices
    dry_run: bool
    multirun: bool
    number: int | None  # position in a sweep
    quiet: bool = False


def run(request: Request, start: Callable[[Job], float | None]) -> None:
    """Compose each job of the request and hand it to `start`. Raises ConfigError for what Hydra refuses."""
    overrides, problems = prepare(request.overrides, request.config_dir, request.multirun)
    if problems:
        raise ConfigError(problems + _faults_of_rest(request, overrides))
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # import paths of a user's own code work from the folder it lies in
    try:
        _run_hydra(request, overrides, start, detect())
    except NeedsAssumedDevices:
        _run_hydra(request, overrides, start, assumed({}))


def _run_hydra(request: Request, overrides: list[str], start: Callable, devices: Devices) -> None:
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    arguments = ["agrpo train", *overrides]
    arguments += ["--multirun"] if request.multirun else []
    arguments += ["--config-dir", request.config_dir] if request.config_dir else []
    arguments += ["--cfg", request.show] if request.show else []
    arguments += ["--resolve"] if request.resolve else []
    # Full errors make Hydra raise instead of printing and exiting; DEFAULT_SYNC is read by conf/train.yaml.
    variables = {"HYDRA_FULL_ERROR": "1", SYNC_VARIABLE: DEFAULT_SYNC[devices.kind]}
    task = _Task(start, devices, request.dry_run, request.multirun, request.quiet, time.time(), os.getpid())
    _register_resolver()
    with _replaced(arguments, variables):
        try:
            hydra.main(version_base="1.3", config_path=str(choices.conf_dir()), config_name=ROOT)(task)()
        except _Left as left:
            raise left.error from None
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(one_line(error)) from error
        except OSError:
            # The run folder could not be made: the checks name it, with everything else that is wrong.
            faults = _faults_of_rest(request, overrides)
            if faults:
                raise ConfigError(faults) from None
            raise
    if task.failures:
        raise task.failures[0]


@dataclass(frozen=True)
class _Task:
    """Hydra's task function: one call per job; a class, because launchers pickle it."""

    start: Callable[[Job], float | None]
    devices: Devices
    dry_run: bool
    multirun: bool
    quiet: bool
    begun_at: float
    pid: int
    failures: list[Exception] = field(default_factory=list)

    def __call__(self, composed: Any) -> float | None:
        from hydra.core.hydra_config import HydraConfig

        hydra = HydraConfig.get()
        folder = Path(hydra.runtime.output_dir)
        number = hydra.job.num if self.multirun else None
        typed = shown(list(hydra.overrides.task))
        # Each job writes its own configuration; Hydra's copy for the sweep may hold a token.
        (Path(hydra.sweep.dir) / "multirun.yaml").unlink(missing_ok=True)
        try:
            tree = _plain_tree(composed)
            _refuse_resume_in_new_folder(composed, tree)
            _fill_in(tree, folder, hydra.runtime.choices.get("recipe") or "default")
            devices = assumed(tree) if self.devices.assumed else self.devices
            return self.start(Job(tree, typed, devices, self.dry_run, self.multirun, number, self.quiet))
        except Exception as error:
            if os.getpid() != self.pid:
                raise  # the launcher runs jobs elsewhere and reports them itself
            if not self.multirun:
                raise _Left(error) from None
            if not hydra.sweeper._target_.endswith("BasicSweeper"):
                raise  # a sweeper that learns from results has to know
            self.failures.append(error)  # later jobs still run (CLI-7)
            return None
        finally:
            _remove_if_unused(folder, self.begun_at)


def compose_tree(overrides: list[str], config_dir: str | None = None) -> dict[str, Any]:
    """The composed configuration as plain values, unchecked; run.output_dir as configured. Raises ConfigError."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    overrides, problems = prepare(overrides, config_dir)
    if problems:
        raise ConfigError(problems)
    path = [f"hydra.searchpath=[file://{Path(config_dir).resolve()}]"] if config_dir else []
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(choices.conf_dir()), version_base="1.3"):
            composed = compose(ROOT, overrides + path)
        return _plain_tree(composed)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(one_line(error)) from error
    finally:
        GlobalHydra.instance().hydra = outer


def _plain_tree(composed: Any) -> dict[str, Any]:
    """The composed configuration as plain values, interpolations resolved. Raises ConfigError for one that fails."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    _register_resolver()
    try:
        return OmegaConf.to_container(composed, resolve=True, throw_on_missing=False)
    except OmegaConfBaseException as error:
        raise ConfigError(one_line(error)) from error


def _refuse_resume_in_new_folder(composed: Any, tree: dict[str, Any]) -> None:
    """A folder named by the time of the start is new each time: nothing in it could be continued (RES-9)."""
    from omegaconf import OmegaConf

    run = OmegaConf.to_container(composed, resolve=False).get("run")
    if not isinstance(run, dict) or tree["run"].get("resume") != "auto" or "${now:" not in str(run.get("output_dir")):
        return
    line = (
        "run.resume=auto looks for checkpoints in run.output_dir, and its default is a new folder at every start; set "
        "run.output_dir=FOLDER, the folder of the run to continue"
    )
    raise ConfigError(line)


def _register_resolver() -> None:
    """`${agrpo.recipe:quickstart/model}` is the path of a file that ships with a recipe."""
    from omegaconf import OmegaConf

    import agrpo.recipes

    OmegaConf.register_new_resolver(
        "agrpo.recipe", lambda path: str(Path(next(iter(agrpo.recipes.__path__))) / path), replace=True
    )


def _fill_in(tree: dict[str, Any], folder: Path, recipe: str) -> None:
    """The values that only a composed job knows: its folder, and names made from it."""
    if isinstance(tree.get("run"), dict):
        tree["run"]["output_dir"] = str(folder)
    if isinstance(tree.get("rollout"), dict):
        tree["rollout"]["experiment_name"] = tree["rollout"].get("experiment_name") or recipe
        tree["rollout"]["trial_name"] = tree["rollout"].get("trial_name") or folder.name


def _faults_of_rest(request: Request, overrides: list[str]) -> list[str]:
    """Faults of the overrides that could be parsed: they belong into the same report. Sweeps are left out."""
    from agrpo.config import check

    try:
        check(compose_tree([] if request.multirun else overrides, request.config_dir), detect())
    except ConfigError as error:
        return [line for line in error.problems if "is required" not in line]
    return []


@contextlib.contextmanager
def _replaced(arguments: list[str], variables: dict[str, str]) -> Iterator[None]:
    """Hydra's runner reads sys.argv and the environment; both are put back afterwards."""
    argv, before = sys.argv, {name: os.environ.get(name) for name in variables}
    sys.argv = arguments
    os.environ.update(variables)
    try:
        yield
    finally:
        sys.argv = argv
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _remove_if_unused(folder: Path, begun_at: float) -> None:
    """Hydra makes the run folder before the checks; a refused or dry run leaves none behind."""
    for path in (folder, *folder.parents[:2]):
        try:
            is_in_use = path.resolve() in (Path.cwd(), *Path.cwd().parents)
            if is_in_use or path.stat().st_mtime < begun_at - 1 or any(path.iterdir()):
                return
            path.rmdir()
        except OSError:
            return
