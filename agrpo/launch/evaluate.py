"""`agrpo eval MODEL`: the evaluations of a configuration for one model, with a server started for it and no training."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console as Screen

from agrpo.config import Config
from agrpo.errors import ConfigError, ServerError, StallError
from agrpo.launch import check, diagnosis, plan, run_folder
from agrpo.launch import job as jobs
from agrpo.launch.server import Server, weight_label
from agrpo.lifecycle import write_atomic
from agrpo.metrics.console import Console
from agrpo.metrics.live import aligned
from agrpo.metrics.sinks import finite

if TYPE_CHECKING:
    from agrpo.config.runner import Job

FILE_NAME = "evaluation.json"
LOOK_S = 0.5


def evaluate(job: Job, as_json: bool) -> None:
    """Start the server, play every evaluation of the configuration, print a table and write `evaluation.json`.

    ServerError where the server dies, the weights change meanwhile or an evaluation scored nothing; StallError without
    progress.
    """
    config, _ = jobs.check(_without_training(job.tree), job.devices)
    if not config.eval:
        raise ConfigError(
            "eval has no entries: name one, for example '+eval.heldout={_target_: agrpo.eval.Evaluation, data: {_target_: "
            "agrpo.data.jsonl.Jsonl, path: FILE}}', or choose a recipe that has some"
        )
    config = plan.resolved(config)
    run_dir, ports = Path(config.run.output_dir), plan.Ports.free()
    urls = plan.server_urls(config, ports)
    with run_folder.prepare(config, job.overrides, ports), _console(run_dir, as_json) as console:
        server = Server(
            plan.server_launch(config, run_dir, ports), urls, run_dir,
            timeout_s=config.server.timeout, max_restarts=0, console=console,
        )  # fmt: skip
        try:
            server.start()
            server.await_healthy(lambda: _raise_if_dead(server), lambda: [server.child] if server.child else [])
            check.raise_failed(check.rows_of(config, urls, run_dir))
            results, unscored = asyncio.run(_played(config, urls, server))
        finally:
            server.stop()
    answer = {"model": config.model.path, "evaluations": results}
    write_atomic(run_dir / FILE_NAME, json.dumps(answer, indent=1) + "\n")
    print(json.dumps(answer, indent=1)) if as_json else show(results, run_dir / FILE_NAME)
    if unscored:
        raise ServerError("\n".join(unscored))


def _without_training(tree: dict[str, Any]) -> dict[str, Any]:
    """The model is whole and nothing is sent to the server, whatever the recipe trains."""
    model = {**tree["model"], "lora": {**tree["model"].get("lora", {}), "enabled": False}}
    sync = {**tree["sync"], "mode": "auto"} if "mode" in tree["sync"] else tree["sync"]
    return {**tree, "model": model, "sync": sync, "run": {**tree["run"], "resume": None}}


def _console(run_dir: Path, as_json: bool) -> Console:
    """Where standard output is the JSON object, what happens meanwhile goes to standard error."""
    return Console(run_dir, live=False, output=Screen(highlight=False, stderr=True) if as_json else None)


def _raise_if_dead(server: Server) -> None:
    if server.has_failed:
        raise diagnosis.died(server.child, [server.child], "")


async def _played(
    config: Config, urls: tuple[str, ...], server: Server
) -> tuple[dict[str, dict[str, float | None]], list[str]]:
    """Name -> figures, each of the one version that the server says it has; and a line for each that scored nothing."""
    from agrpo.rollout import __main__ as rollout

    rollout.leave_the_training_world()
    label = weight_label(urls[0]) or ""
    version = int(label) if label.isdecimal() else 0
    progress_at, results = time.monotonic(), {}

    def progress(phase: str) -> None:
        nonlocal progress_at
        progress_at = time.monotonic()

    async def keep(name: str, result: dict[str, float]) -> None:
        if not result:
            raise ServerError(f"evaluation {name}: the weights of {urls[0]} changed meanwhile; evaluate again when no run uses it")
        results[name] = finite({k: v for k, v in result.items() if k != "version"})

    async def watch() -> None:
        limit = config.rollout.progress_timeout or float("inf")
        while True:
            await asyncio.sleep(LOOK_S)
            _raise_if_dead(server)
            if time.monotonic() - progress_at > limit:
                raise StallError(f"no rollout was finished for {limit:g} s (rollout.progress_timeout)")

    async with contextlib.AsyncExitStack() as stack:
        evaluating = await rollout.open_evaluating(config, urls, version, progress, stack)
        work = asyncio.create_task(evaluating.run(list(config.eval), version, keep))
        watching = asyncio.create_task(watch())
        try:
            done, _ = await asyncio.wait([work, watching], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (work, watching):
                task.cancel()
            await asyncio.gather(work, watching, return_exceptions=True)
    return results, list(evaluating.unscored.values())


def show(results: dict[str, dict[str, float]], path: Path) -> None:
    """Each evaluation as a column, so that any number of k stays in 80; the interval is that of a normal approximation."""
    ks = sorted({int(key.removeprefix("pass_at_")) for r in results.values() for key in r if key.startswith("pass_at_")})
    labels = ["", "reward", "95 %", *(f"pass@{k}" for k in ks), "prompts", "rollouts", "failed", "tokens", "clipped", "seconds"]
    columns = [labels]
    for name, r in results.items():
        passed = [_number(r.get(f"pass_at_{k}")) for k in ks]
        counts = [f"{r[key]:.0f}" for key in ("prompts_count", "rollouts_count", "failed_count")]
        lengths = [f"{r['mean_length']:.1f}", f"{r['clipped_ratio']:.1%}", f"{r['duration_s']:.1f}"]
        spread = _number(r["reward_ci95"])
        columns.append([name, _number(r["reward"]), spread if spread == "-" else f"+-{spread}", *passed, *counts, *lengths])
    for line in aligned(list(zip(*columns, strict=True)), "l" + "r" * len(results)):
        print(line)
    print(f"written to {path}")


def _number(value: float | None) -> str:
    return "-" if value is None or value != value else f"{value:.4f}"
