"""Who plays the rollouts: the `env` component, or what `rollout.workflow` names (AREAL-WF-61 to 64).

null                           the `env` component
class with arun_episode        instantiated with rollout.workflow_kwargs, which must be given
instance with arun_episode     used as it is
other class with run           an agent, instantiated with the kwargs or none
other object with run          an agent, used as it is
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

from agrpo.config import locate
from agrpo.env.workflow import GenerationHyperparameters
from agrpo.errors import ConfigError, ContractError

_log = logging.getLogger(__name__)


def problems(config: Any) -> list[str]:
    """What is wrong with `rollout.workflow` and its kwargs; the module is imported, nothing is instantiated."""
    rollout = config.rollout
    if rollout.workflow is None:
        return ["rollout.workflow_kwargs needs rollout.workflow"] if rollout.workflow_kwargs is not None else []
    try:
        target = locate(rollout.workflow)
    except ConfigError as error:
        return [f"rollout.workflow: {line}" for line in error.problems]
    return _problems_of(rollout.workflow, target, rollout.workflow_kwargs)


def _problems_of(path: str, target: Any, kwargs: dict[str, Any] | None) -> list[str]:
    if is_workflow(target):
        if not inspect.iscoroutinefunction(target.arun_episode):
            return [f"rollout.workflow: {path}.arun_episode must be `async def arun_episode(self, engine, data)`"]
        if isinstance(target, type) and kwargs is None:
            return [
                f"rollout.workflow_kwargs must be given for the class {path}; rollout.workflow_kwargs={{}} is enough"
            ]
        return _kwargs_problems(path, target, kwargs)
    run = getattr(target, "run", None)
    if not callable(run):
        return [
            f"rollout.workflow: {path} is neither a workflow (async def arun_episode(self, engine, data)) nor an agent "
            "(async def run(self, data, **extra))"
        ]
    if not inspect.iscoroutinefunction(run):
        return [f"rollout.workflow: {path}.run must be `async def run(self, data, **extra)`, it is not async"]
    return _kwargs_problems(path, target, kwargs)


def _kwargs_problems(path: str, target: Any, kwargs: dict[str, Any] | None) -> list[str]:
    """Arguments that the class does not take, found without making an instance."""
    if not isinstance(target, type):
        return []
    kwargs = kwargs or {}
    try:
        inspect.signature(target).bind(**kwargs, **dict.fromkeys(_given_by_the_run(target, kwargs)))
    except TypeError as error:
        return [f"rollout.workflow_kwargs does not fit {path}{inspect.signature(target)}: {error}"]
    except ValueError:
        return []  # a class without a signature of its own
    return []


def is_workflow(target: Any) -> bool:
    """Whether the class or object has `arun_episode`; everything else is an agent."""
    return callable(getattr(target, "arun_episode", None))


def open_player(
    config: Any,
    tokenizer: Any,
    max_model_len: int,
    eos_ids: frozenset[int],
    version: Callable[[], int] = lambda: 0,
) -> Any:
    """The player of this run; `version` tells which weights the servers hold.

    ConfigError as `problems`; ContractError if the user's class cannot be instantiated.
    """
    rollout = config.rollout
    if rollout.workflow is None:
        return config.env.open(tokenizer, config.sampler, max_model_len, eos_ids, run_seed=config.run.seed)
    lines = problems(config)
    if lines:
        raise ConfigError(lines)
    target = locate(rollout.workflow)
    owner = _instance(config, target, tokenizer)
    facts = {"tokenizer": tokenizer, "sampler": config.sampler, "max_model_len": max_model_len, "eos_ids": eos_ids}
    if not is_workflow(target):
        from agrpo.env.agent import AgentPlayer

        return AgentPlayer(owner, **facts, settings=rollout)
    from agrpo.env.workflow_player import WorkflowPlayer

    return WorkflowPlayer(
        owner,
        **facts,
        settings=rollout,
        centering=config.loss.wants_head,
        needs_all_rewards=getattr(config.advantage, "rollout_time_norm", False),
        version=version,
    )


def _instance(config: Any, target: Any, tokenizer: Any) -> Any:
    rollout = config.rollout
    if not isinstance(target, type):
        if rollout.workflow_kwargs:
            _log.warning("rollout.workflow_kwargs is ignored: %s is an instance already", rollout.workflow)
        return target
    kwargs = dict(rollout.workflow_kwargs or {})
    own = {"tokenizer": lambda: tokenizer, "gconfig": lambda: _gconfig(config.sampler)}
    kwargs |= {name: own[name]() for name in _given_by_the_run(target, kwargs)}
    try:
        return target(**kwargs)
    except Exception as error:
        raise ContractError(f"rollout.workflow: {rollout.workflow}() raised {type(error).__name__}: {error}") from error


def _given_by_the_run(cls: type, kwargs: dict[str, Any]) -> list[str]:
    """Arguments that a configuration file cannot hold: the tokenizer and the sampling settings of the run."""
    parameters = inspect.signature(cls).parameters
    return [name for name in ("tokenizer", "gconfig") if name in parameters and name not in kwargs]


def _gconfig(sampler: Any) -> GenerationHyperparameters:
    return GenerationHyperparameters(max_new_tokens=sampler.max_completion_length, **sampler.distribution)
