"""No data set: the environment owns the tasks (DATA-3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agrpo.schema import setting


@dataclass(frozen=True, kw_only=True, slots=True)
class NoData:
    """Every group starts with an empty prompt; the environment's reset() gives the task."""

    shuffle: bool = setting(False, "without effect: there are no rows")
    seed: int | None = setting(None, "without effect: there are no rows", ge=0)

    def open(self, needs_prompt: bool = False) -> None:
        return None

    @property
    def is_endless(self) -> bool:
        return True

    def columns(self) -> list[str] | None:
        return []

    def problems(self, config: Any) -> list[str]:
        lines = []
        factory = getattr(config.env, "factory", None)
        if factory is None and config.rollout.workflow is None:
            lines.append(
                "env.factory must name an environment, or rollout.workflow a workflow or agent, when there is no data set, "
                "because nothing else gives a prompt; or choose data, for example data.path=train.jsonl"
            )
        elif isinstance(factory, Mapping):
            lines.append(
                "env.factory must be a single environment without a data set, got a mapping: only a data set's `environment` "
                "column can choose between several"
            )
        if not config.run.max_steps or config.run.max_steps < 1:
            lines.append(
                "run.max_steps must be set (>= 1) without a data set, because there is no epoch that could end the run"
            )
        return lines
