"""`summary.json`: what a finished run came to, from its records (MAP-16)."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agrpo.lifecycle import write_atomic
from agrpo.metrics.sinks import read_records

FILE_NAME = "summary.json"


def write_summary(run_dir: Path, exit_reason: str, **facts: Any) -> dict[str, Any]:
    """Write and return the summary; `facts` are further entries (paths, wall time, versions)."""
    summary = {**summarize(read_records(run_dir), exit_reason), **facts}
    write_atomic(Path(run_dir) / FILE_NAME, json.dumps(summary, indent=2) + "\n")
    return summary


def read_summary(run_dir: Path) -> dict[str, Any]:
    """The summary of a run, {} if it wrote none."""
    path = Path(run_dir) / FILE_NAME
    return json.loads(path.read_text()) if path.exists() else {}


def summarize(records: Sequence[dict[str, Any]], exit_reason: str) -> dict[str, Any]:
    """The last step, mean loss over all records, last value of each metric, each evaluation before and after."""
    losses = [r["loss"] for r in records if r.get("loss") is not None]
    last: dict[str, Any] = {}
    for record in records:
        last.update(record)  # a record leaves out what had no events, so the last value may be older
    return {
        "global_step": last.pop("step", 0),
        "exit_reason": exit_reason,
        "training_loss": sum(losses) / len(losses) if losses else None,
        "eval": evaluations(records),
        "metrics": last,
    }


def evaluations(records: Sequence[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Evaluation -> `before` and `after` with reward, version and step: the first and the last that was made."""
    return {name: {"before": points[0], "after": points[-1]} for name, points in evaluation_points(records).items()}


def evaluation_text(points: Mapping[str, Mapping[str, Any]]) -> str:
    """`0.520 +-0.041 (version 1) -> 0.940 +-0.020 (version 60)`; one figure while there is only one."""

    def written(point: Mapping[str, Any]) -> str:
        version, spread = point.get("version"), point.get("reward_ci95")
        text = f"{point['reward']:.3f}" + (f" +-{spread:.3f}" if spread is not None else "")
        return text + (f" (version {version:.0f})" if version is not None else "")

    before, after = points["before"], points["after"]
    return written(before) + (f" -> {written(after)}" if after != before else "")


def evaluation_points(records: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Evaluation -> its results in their order, one per step: one that a resumed run made again counts as the last of them."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for record in records:
        for key, reward in record.items():
            if key.startswith("eval/") and key.endswith("/reward") and isinstance(reward, int | float):
                name = key.removeprefix("eval/").removesuffix("/reward")
                step = record.get(f"eval/{name}/step")
                step = int(record["step"] if step is None else step)
                point = {"reward": reward, "version": record.get(f"eval/{name}/version"), "step": step}
                if isinstance(spread := record.get(f"eval/{name}/reward_ci95"), int | float):
                    point["reward_ci95"] = spread
                found.setdefault(name, {})[step] = point
    return {name: list(points.values()) for name, points in found.items()}


def written(run_dir: Path) -> dict[str, str | Path]:
    """What a user will look for in a finished run's folder, by name, and the commands that read it; only what is there."""
    names = {
        "model": "model",
        "summary": "summary.json",
        "metrics": "metrics.jsonl",
        "checkpoints": "checkpoints",
        "configuration": "config.yaml",
        "logs": "logs",
    }
    paths = {label: run_dir / name for label, name in names.items() if (run_dir / name).exists()}
    folder = min(str(run_dir), os.path.relpath(run_dir), key=len)
    return {**paths, **{name: f"agrpo {name} {shlex.quote(folder)}" for name in ("explain", "report")}}
