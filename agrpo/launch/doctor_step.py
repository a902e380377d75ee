"""The parts of `agrpo doctor` that ask a server or start one: its checks, and one step of the real processes."""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

from agrpo.config import Config
from agrpo.errors import AgrpoError
from agrpo.launch.doctor_code import NUM_PROMPTS, Tell, first_prompts, short
from agrpo.launch.doctor_host import Finding

MAX_TOKENS = 64  # of an answer of the step that is tried


def server(config: Config, folder: Path, tell: Tell) -> None:
    """The checks of a server that runs already; nothing there is changed."""
    from agrpo.launch.check import rows_of
    from agrpo.launch.prompts import long_prompts

    _tell_rows(rows_of(config, config.server.urls, folder, long_prompts(config)), tell)


def _tell_rows(rows: Any, tell: Tell) -> None:
    for row in rows:
        tell(Finding(f"server: {row.name}", row.status, row.found, row.fix))


def step(config: Config, folder: Path, tell: Tell) -> None:
    """The server with all its checks, then one optimizer step of the real processes, in a folder that is thrown away."""
    from agrpo.launch import check
    from agrpo.launch.supervisor import supervise

    tried, began = _smallest(config, folder / "run"), time.monotonic()

    def checked(_: Config, urls: Any, run_dir: Path, note: Any, prompts: Any) -> None:
        tell(Finding("server start", "ok", f"answers at {', '.join(urls)}"))
        rows = check.rows_of(config, urls, run_dir, prompts)  # those of the run to come, not of the smallest
        _tell_rows(rows, tell)
        check.raise_failed(rows)

    try:
        summary = supervise(tried, [], [], check_server=checked)
    except AgrpoError as error:
        logs = folder / "run" / "logs"
        tell(Finding("step", "fail", short(str(error), 1500), f"read the log files in {logs}" if logs.exists() else ""))
        return
    tell(_stepped(summary, folder / "run", time.monotonic() - began))


def _stepped(summary: dict[str, Any], run_dir: Path, seconds: float) -> Finding:
    metrics = summary.get("metrics", {})
    size = sum(p.stat().st_size for p in (run_dir / "checkpoints").rglob("*") if p.is_file())
    names = ("loss", "grad_norm", "reward", "perf/step_s", "perf/weight_sync_s", "perf/weight_sync_parity")
    figures = ", ".join(f"{name} {metrics[name]:.4g}" for name in names if isinstance(metrics.get(name), int | float))
    text = f"one step through server, scorer and trainer: {figures}; a checkpoint is {size / 2**20:.1f} MiB"
    if metrics.get("frac_reward_zero_std") == 1.0:
        fix = "groups with equal rewards teach nothing; look at the rewards, and at rollout.group_size"
        return Finding("step", "warn", f"{text}; all groups had equal rewards", fix, seconds)
    return Finding("step", "ok", text, seconds=seconds)


def _smallest(config: Config, run_dir: Path) -> Config:
    """The same components with the least work that makes a step on this machine; nothing is logged elsewhere or uploaded."""
    replace, fsdp = dataclasses.replace, config.model.fsdp
    answer = min(config.sampler.max_completion_length, MAX_TOKENS)
    budget = config.packer.token_budget
    longest = _longest_prompt(config) + answer
    advantage = config.advantage
    if hasattr(advantage, "drop_zero_std"):
        advantage = replace(advantage, drop_zero_std=False)  # answers cut short may all be worth the same
    # Copies of the sharded model that the ranks of other nodes would hold are left out with them.
    copies = math.gcd(fsdp.options.get("replicate", 1), config.run.num_processes or 1)
    options = {**fsdp.options, "replicate": copies} if "replicate" in fsdp.options else fsdp.options
    return replace(
        config,
        model=replace(config.model, fsdp=replace(fsdp, options=options)),
        run=replace(
            config.run, output_dir=str(run_dir), num_nodes=1, master=None, max_steps=1, resume=None,
            gradient_accumulation_steps=1, objective=None,
        ),
        checkpoint=replace(config.checkpoint, strategy="no", save_final=True, hub=replace(config.checkpoint.hub, push="no")),
        rollout=replace(config.rollout, dump_to_file=False, accept_fn=None),
        sampler=replace(config.sampler, max_completion_length=answer),
        packer=replace(config.packer, token_budget=longest if budget is None else min(budget, longest)),
        advantage=advantage,
        logger=replace(config.logger, sinks={}, logging_steps=1, log_completions=False),
        eval={},
    )  # fmt: skip


def _longest_prompt(config: Config) -> int:
    from agrpo.env.render import Renderer
    from agrpo.model.tokenizer import load_tokenizer

    _, prompts = first_prompts(config, NUM_PROMPTS)
    renderer = Renderer(load_tokenizer(config.model), config.sampler.chat_template_kwargs)
    lengths = [len(renderer.ids(p.messages)) for p in prompts if p.messages]
    # An environment's first message is not known here, and may be as long as everything the model says.
    return max(lengths, default=0) + (4 * MAX_TOKENS if getattr(config.env, "factory", None) else 0) or MAX_TOKENS
