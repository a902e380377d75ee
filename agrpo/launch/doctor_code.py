"""The parts of `agrpo doctor` that run user code: data and prompts, reward functions, tools and environments."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from agrpo.config import Config
from agrpo.errors import AgrpoError, RolloutFailure
from agrpo.launch.doctor_host import Finding

Tell = Callable[[Finding], None]
SHOWN = 300  # characters of a prompt or an observation
LONG_SCORE_S = 5.0  # a group that takes longer to score may hold generation
NUM_PROMPTS = 2  # whose answers are scored
ANSWERS = ("I do not know.", "The answer is 42.")
UNSCORED = {  # reason of a ScoreError -> what to do
    "raised": "mend the function",
    "timeout": "make the function faster, or raise scorer.timeout",
    "died": "look for what killed its process: often the memory was used up (dmesg)",
}


def as_rollout() -> None:
    """As the rollout process is: without a GPU or a training job in sight."""
    from agrpo.rollout.__main__ import leave_the_training_world

    leave_the_training_world()


def first_prompts(config: Config, count: int, evaluation: Any = None) -> tuple[Any, list[Any]]:
    """The rows, and the first prompts in the order of the run, or of an evaluation."""
    from agrpo.data.prompts import prompts_of
    from agrpo.data.rows import gives_prompts

    source = config.data if evaluation is None else evaluation.data
    rows = source.open(needs_prompt=not gives_prompts(config))
    if evaluation is not None:  # it asks in the order of its rows
        prompts = prompts_of(rows, False, 0)
    else:
        prompts = prompts_of(rows, source.shuffle, config.run.seed if source.seed is None else source.seed)
    return rows, [prompts.prompt_of(i) for i in range(count)]


def data(config: Config, folder: Path, tell: Tell) -> None:
    """The rows, the first prompt as the model reads it, and whether the template keeps what it has rendered."""
    as_rollout()
    from agrpo.env.render import Renderer
    from agrpo.model.tokenizer import load_tokenizer

    rows, prompts = first_prompts(config, 64)
    tell(_opened("data", rows, prompts))
    for name, evaluation in config.eval.items():
        try:
            tell(_opened(f"data: {name}", *first_prompts(config, 1, evaluation)))
        except AgrpoError as error:
            tell(Finding(f"data: {name}", "fail", str(error)))
    tokenizer = load_tokenizer(config.model)
    renderer = Renderer(tokenizer, config.sampler.chat_template_kwargs)
    asked = [p for p in prompts if p.messages]
    if not asked:
        tell(Finding("prompt", "skip", "rows have no prompt: the environment gives it"))
    else:
        lengths = [len(renderer.ids(p.messages)) for p in asked]
        text = renderer.text(asked[0].messages, generation_prompt=True)
        spread = f"{min(lengths)} to {max(lengths)} tokens, mean {sum(lengths) / len(lengths):.0f}, over {len(lengths)} prompts"
        tell(_room(config, lengths, f"{spread}; the first: {short(text)}"))
    if renderer.grows(with_users=False) or renderer.grows(with_users=True):
        tell(Finding("template", "ok", "appending messages leaves the tokens before them as they were"))
    else:
        fix = "harmless for one answer per prompt; with tools or environments each turn becomes a sample of its own"
        tell(Finding("template", "warn", "appending messages changes tokens before them", fix))


def _opened(name: str, rows: Any, prompts: list[Any]) -> Finding:
    size = f"{len(rows)} rows" if hasattr(rows, "__len__") else "no rows of its own" if rows is None else "a stream"
    return Finding(name, "ok", f"{size}; columns {', '.join(prompts[0].columns) or 'none'} beside the prompt")


def _room(config: Config, lengths: list[int], text: str) -> Finding:
    from agrpo.launch.plan import context_length

    context, answer, longest = context_length(config), config.sampler.max_completion_length, max(lengths)
    if context is None or longest + answer <= context:
        return Finding("prompt", "ok", text)
    fix = f"raise server.max_model_len to {longest + answer} or more, or lower sampler.max_completion_length"
    found = f"{text}; the longest leaves {max(context - longest, 0)} of the {answer} tokens that an answer may take"
    ends = longest >= context if config.rollout.on_long_prompt == "abort" else min(lengths) >= context
    return Finding("prompt", "fail" if ends else "warn", found, fix)


def rewards(config: Config, folder: Path, tell: Tell) -> None:
    """Every reward function on real rows, in the processes that a run scores in."""
    from agrpo.model.tokenizer import load_tokenizer

    as_rollout()
    tokenizer = load_tokenizer(config.model)
    if hasattr(config.scorer, "entries") and not config.scorer.entries():
        tell(Finding("rewards", "skip", "no reward function: an environment, a workflow or a loop gives the reward"))
    else:
        _, prompts = first_prompts(config, NUM_PROMPTS)
        asyncio.run(_rewards(config.scorer, config.data, prompts, tokenizer, "", tell))
    for name, evaluation in config.eval.items():
        if evaluation.scorer is not None:
            _, prompts = first_prompts(config, 1, evaluation)
            asyncio.run(_rewards(evaluation.scorer, evaluation.data, prompts, tokenizer, f": {name}", tell))


async def _rewards(scoring: Any, source: Any, prompts: list[Any], tokenizer: Any, whose: str, tell: Tell) -> None:
    from agrpo.types import Group

    began = time.monotonic()
    scorer = await scoring.open(source.columns() if hasattr(source, "columns") else None)
    try:
        told = f"its workers have imported {', '.join(scorer.names)}"
        tell(Finding(f"scorer{whose}", "ok", told, seconds=time.monotonic() - began))
        for index, prompt in enumerate(prompts):
            rollouts = tuple(_rollout(tokenizer, answer) for answer in ANSWERS)
            began = time.monotonic()
            try:
                scored = await scorer.score(Group(index, prompt, rollouts, 0))
            except AgrpoError:
                raise
            except Exception as error:  # a group that cannot be scored is dropped in a run
                todo = UNSCORED.get(getattr(error, "reason", "raised"), UNSCORED["raised"])
                lost = "an evaluation would leave such prompts out" if whose else "a run would drop such groups"
                tell(Finding(f"rewards{whose}", "fail", f"row {prompt.row_index}: {short(_told(error))}", f"{lost}; {todo}"))
                continue
            tell(dataclasses.replace(_scored(prompt, scored, time.monotonic() - began), name=f"rewards{whose}"))
    finally:
        await scorer.close()


def _scored(prompt: Any, group: Any, seconds: float) -> Finding:
    given = "; ".join(
        f"{answer!r}: " + ", ".join(f"{name} {value}" for name, value in rollout.rewards.items())
        for answer, rollout in zip(ANSWERS, group.rollouts, strict=True)
    )
    text = f"row {prompt.row_index}: {given}"
    silent = [name for name in group.rollouts[0].rewards if all(r.rewards[name] is None for r in group.rollouts)]
    if silent:
        fix = f"None is no score: if {', '.join(silent)} gives it to every answer of a run too, it has no influence, or no group is trained"
        return Finding("rewards", "warn", text, fix, max(seconds, 1e-3))
    if seconds > LONG_SCORE_S:
        return Finding("rewards", "warn", text, "raise scorer.max_concurrent_groups, or make the function faster", seconds)
    return Finding("rewards", "ok", text, seconds=max(seconds, 1e-3))


def _turn(ids: list[int], prompt_ids: Any) -> Any:
    from agrpo.types import Turn

    n, heads = len(ids), np.zeros((len(ids), 0), np.float32)
    return Turn(
        np.asarray(prompt_ids, np.int32), np.asarray(ids, np.int32), np.zeros(n, np.float32), np.ones(n, bool),
        np.zeros(n, np.int32), heads.astype(np.int32), heads, None, "stop",
    )  # fmt: skip


def _rollout(tokenizer: Any, answer: str) -> Any:
    from agrpo.types import Rollout

    ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
    return Rollout((_turn(ids, []),), [{"role": "assistant", "content": answer}])


def tools(config: Config, folder: Path, tell: Tell) -> None:
    """What plays the rollouts is made; an environment is reset with a real row and left again."""
    as_rollout()
    asyncio.run(_tools(config, tell))


async def _tools(config: Config, tell: Tell) -> None:
    from agrpo.env.resolve import open_player
    from agrpo.model.tokenizer import load_tokenizer
    from agrpo.rollout.__main__ import start_player

    tokenizer = load_tokenizer(config.model)
    rows, prompts = first_prompts(config, 1)
    async with contextlib.AsyncExitStack() as stack:
        player = open_player(config, tokenizer, 2**20, frozenset({tokenizer.eos_token_id or 0}))
        await start_player(player, stack)
        if hasattr(player, "check_rows"):
            player.check_rows(rows)
        if not hasattr(player, "stage"):
            tell(Finding("workflow", "ok", f"{config.rollout.workflow} was made and started"))
            return
        try:
            async with player.stage(prompts[0], -1, 0) as stage:
                offered = [tool.__name__ for tool in stage.tools]
                asked = stage.messages[-1]["content"] if stage.messages else ""
        except RolloutFailure as failure:
            fix = "mend the environment: every rollout of a run begins like this"
            tell(Finding("environment", "fail", f"{failure.reason}: {short(failure.text)}", fix))
            return
    name = "environment" if getattr(config.env, "factory", None) else "tools"
    if name == "tools" and not offered:
        tell(Finding("tools", "skip", "none are configured"))
        return
    tell(Finding(name, "ok", f"offers {', '.join(offered) or 'no tools'}; the first conversation asks: {short(str(asked))}"))


def _told(error: Exception) -> str:
    """The first line of what a worker says of an error, and the line of code that it names last."""
    text = str(error)
    frames = re.findall(r'File "(.+)", line (\d+)', text)
    where = f" ({frames[-1][0]}, line {frames[-1][1]})" if frames else ""
    return text.partition("\n")[0] + where


def short(text: str, limit: int = SHOWN) -> str:
    text = text.replace("\n", "\\n")
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"
