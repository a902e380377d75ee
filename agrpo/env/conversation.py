"""`env=conversation`: chat through the model's own template, with tools and environments where they are named.

Prompts are sent as token ids and the answer's ids are kept as they are; text is decoded for tool calls and rewards only
(GEN-3).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agrpo.env.calls import template_of
from agrpo.env.environments import ROUTE, Kind, accepted_names, kinds_of
from agrpo.env.player import Player, Rules, route_problems
from agrpo.env.render import Renderer
from agrpo.env.templates import training_template
from agrpo.env.tools import Tool, function_at
from agrpo.errors import ConfigError
from agrpo.schema import setting

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """Settings of a chat rollout."""

    factory: Any = setting(None, "environment class (import path), or a mapping from name to class")
    tools: list[str] = setting(factory=list, doc="import paths of functions the model may call")
    max_tool_calling_iterations: int | None = setting(None, "rounds of tool calls per rollout; null = no limit", ge=0)
    tool_timeout: float | None = setting(None, "seconds per tool call; null = no limit", gt=0)
    time_limit: float | None = setting(
        600.0, "seconds per call of an environment's constructor, reset or get_reward; null = no limit", gt=0
    )
    reuse_instances: bool = setting(True, "pool environment instances and reset them")
    pass_group_seed: bool = setting(False, "pass one seed per group to reset")

    def problems(self, config: Any) -> list[str]:
        try:
            tools, kinds = self._parts()
        except ConfigError as error:
            return error.problems
        lines = [*self._seed_problems(kinds), *_reward_problems(config, kinds)]
        if isinstance(self.factory, Mapping):
            lines += _data_problems(config.data, list(kinds))
        return lines or _template_problems(config, tools, kinds)

    def open(
        self,
        tokenizer: Any,
        sampler: Any,
        max_model_len: int,
        eos_ids: frozenset[int] = frozenset(),
        run_seed: int = 0,
    ) -> Player:
        """A player for one run; `eos_ids` are those of the generation config, the tokenizer's is added (GEN-10).

        ConfigError where tools, environments and the chat template do not fit together.
        """
        if tokenizer.eos_token_id is not None:
            eos_ids |= {int(tokenizer.eos_token_id)}
        tools, kinds = self._parts()
        rules = Rules(
            max_model_len=max_model_len,
            eos_ids=eos_ids,
            max_rounds=self.max_tool_calling_iterations,
            tool_timeout_s=self.tool_timeout,
            env_limit_s=self.time_limit,
            reuses_instances=self.reuse_instances,
            passes_group_seed=self.pass_group_seed,
            run_seed=run_seed,
        )
        renderers = renderers_of(tokenizer, sampler, tools, kinds)
        return Player(tokenizer, rules, renderers, tools, kinds, isinstance(self.factory, Mapping))

    def _parts(self) -> tuple[dict[str, Tool], dict[str, Kind]]:
        """Tools by name and environments by name; ConfigError with every fault of both."""
        tools, kinds, lines = {}, {}, []
        for path in self.tools:
            try:
                tool = function_at(path, "env.tools")
            except ConfigError as error:
                lines += error.problems
                continue
            if tool.name in tools:
                lines.append(
                    f"env.tools: two tools are called {tool.name}; a model could not tell them apart, rename one"
                )
            tools[tool.name] = tool
        if self.factory is not None:
            try:
                kinds = kinds_of(self.factory)
            except ConfigError as error:
                lines += error.problems
        for kind in kinds.values():
            both = sorted(set(kind.tools) & set(tools))
            lines += [f"env.tools: {n} is also a method of {kind.source} (env.factory); rename one" for n in both]
        if lines:
            raise ConfigError(lines)
        return tools, kinds

    def _seed_problems(self, kinds: dict[str, Kind]) -> list[str]:
        if not self.pass_group_seed:
            return []
        if not kinds:
            return ["env.pass_group_seed=true needs an environment: set env.factory, or leave it false"]
        without = [k for k in kinds.values() if not _takes(k.cls.reset, "group_seed")]
        return [f"env.pass_group_seed: {k.source}.reset takes no group_seed; add the parameter" for k in without]


def _takes(function: Any, name: str) -> bool:
    accepted = accepted_names(function)
    return accepted is None or name in accepted


def _reward_problems(config: Any, kinds: dict[str, Kind]) -> list[str]:
    """Without reward functions every environment must give its own reward (REW-1)."""
    if getattr(config.scorer, "functions", True):
        return []
    silent = [k.source for k in kinds.values() if not k.has_reward]
    return [f"env.factory: {s} has no get_reward and scorer.functions is empty; give one of the two" for s in silent]


def _data_problems(data: Any, known: list[str]) -> list[str]:
    """A mapping is routed by a column that must be there, with names that are known (ENV-13)."""
    columns = data.columns() if hasattr(data, "columns") else None
    if not columns:
        return []  # no data set: refused by the data; unknown before it is opened: checked then
    if ROUTE not in columns:
        return [
            f"env.factory is a mapping, so the data need a column `{ROUTE}` that names each row's environment; columns "
            f"found: {', '.join(columns)}"
        ]
    try:
        rows = data.open(needs_prompt=False)
    except ConfigError:
        return []  # the data say so themselves
    return route_problems((rows[i].get(ROUTE) for i in range(len(rows))), known) if hasattr(rows, "__len__") else []


def _template_problems(config: Any, tools: dict[str, Tool], kinds: dict[str, Kind]) -> list[str]:
    """What the chat template cannot do, where the tokenizer is on this machine; else it is said when the run opens."""
    path = Path(config.model.tokenizer_path or config.model.path).expanduser()
    if not (tools or kinds) or not path.is_dir() or config.rollout.workflow is not None:
        return []
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=config.model.trust_remote_code)
    except Exception:
        return []  # said by the model's own checks
    try:
        renderers_of(tokenizer, config.sampler, tools, kinds)
    except ConfigError as error:
        return error.problems
    return []


def renderers_of(tokenizer: Any, sampler: Any, tools: dict[str, Tool], kinds: dict[str, Kind]) -> dict[str, Renderer]:
    """One renderer per environment with the schemas of its tools; "" without environments."""
    kwargs = dict(sampler.chat_template_kwargs or {})
    sets = {name: {**tools, **kind.tools} for name, kind in kinds.items()} or {"": tools}
    template, is_checked, renderers = None, False, {}
    for name, offered in sets.items():
        schemas = [tool.schema for tool in offered.values()]
        if schemas and not is_checked:
            template, is_checked = fitting_template(tokenizer, kwargs, schemas, sampler.require_prefix_template), True
        renderers[name] = Renderer(tokenizer, kwargs, schemas, template)
        if schemas:
            renderers[name].learn_arguments()
    return renderers


def fitting_template(tokenizer: Any, kwargs: dict[str, Any], schemas: list[dict], must_keep: bool) -> str | None:
    """None where the tokenizer's own template serves, else the family's training template (TOOL-3, TURN-10 to TURN-12)."""
    own = Renderer(tokenizer, kwargs, schemas)
    own_fault = _template_fault(own, rounds=3)
    if own_fault is None:
        return None
    known = training_template(template_of(tokenizer))
    if known is not None:
        family, template = known
        fault = _template_fault(Renderer(tokenizer, kwargs, schemas, template), rounds=3)
        if fault is None:
            _log.info("the chat template is replaced by the training template of %s, because it %s", family, own_fault)
            return template
    fault = _template_fault(own, rounds=1)
    is_only_rewriting = fault == REWRITES
    if fault is not None and (must_keep or not is_only_rewriting):
        remedy = (
            "; sampler.require_prefix_template=false accepts it, at the price of forks" if is_only_rewriting else ""
        )
        raise ConfigError(f"model.path: the chat template {fault}, which tools and environments need{remedy}")
    _log.warning("the chat template %s: later turns will be forks", own_fault)
    return None


REWRITES = "renders earlier messages anew when a tool result is appended; it must keep them"
NO_TOOLS = "renders the same with and without tool schemas; a template that shows them is needed"


def _template_fault(renderer: Renderer, rounds: int) -> str | None:
    try:
        if not renderer.supports_tools():
            return NO_TOOLS
        return None if renderer.keeps_history(rounds) else REWRITES
    except Exception as error:
        return f"cannot render tool calls: {error}".replace("\n", " ")
