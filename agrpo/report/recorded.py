"""The rollouts that a run recorded, read back from its files.

The trajectory dump has everything; `completions.jsonl` has messages and rewards only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from agrpo.errors import ConfigError
from agrpo.metrics.sinks import read_lines
from agrpo.train.trace import row_digest

_SWITCH_ON = "rollout.dump_to_file=true rollout.fileroot=FOLDER"


@dataclass(frozen=True, slots=True)
class Record:
    """One training row, or one rollout of `completions.jsonl`."""

    fields: dict[str, Any]  # as the dump has them
    scope: str  # "rollout" or "eval-rollout"
    version: int  # newest version of its group
    messages: list[dict[str, Any]] | None = None  # where no tokens were recorded
    step: int | None = None  # that trained it
    trainer_logprobs: list[float] | None = None  # of the trained tokens, in that step

    @property
    def name(self) -> str:
        """What `--show` takes: group, rollout and row."""
        parts = [self.fields["task_id"], self.fields["rollout_id"], self.fields.get("sample_idx", 0)]
        return "/".join(map(str, parts))


@dataclass(frozen=True, slots=True)
class Recorded:
    """What was found for a run, and the tokenizer that reads its ids (None where that is not known)."""

    records: list[Record]
    tokenizer_path: str | None
    has_tokens: bool


def read(run: Path) -> Recorded:
    """The records of a run folder or of a dump folder. ConfigError where there are none, with what to turn on."""
    if not run.is_dir():
        raise ConfigError(
            f"{run} is not a folder; give a run's folder, for example runs/quickstart/2026-01-31_12-00-00"
        )
    config = yaml.safe_load((run / "config.yaml").read_text()) if (run / "config.yaml").exists() else None
    if config is None:
        folders = (run, *sorted(run.glob("*/*")))
        found = [record for folder in folders for record in last_of_each(_dumped(folder))]
        if not found:
            raise ConfigError(f"{run} holds no run (config.yaml) and no dumped rollouts (rollout/VERSION/GROUP.jsonl)")
        return Recorded(found, None, True)
    if not isinstance(config, dict) or not isinstance(config.get("rollout"), dict):
        raise ConfigError(f"{run / 'config.yaml'} has no section rollout, so it says nothing of recorded rollouts")
    settings, model = config["rollout"], config["model"]
    tokenizer = settings.get("tokenizer_path") or model.get("tokenizer_path") or model["path"]
    if settings["dump_to_file"]:
        folder = Path(settings["fileroot"]).expanduser() / settings["experiment_name"] / settings["trial_name"]
        records = last_of_each(_dumped(folder))
        if not records:
            raise ConfigError(
                f"no rollout lies below {folder} (rollout.fileroot); relative folders are taken from here"
            )
        return Recorded(_with_trained(records, run), tokenizer, True)
    if (run / "completions.jsonl").exists():
        return Recorded(last_of_each(_completions(run / "completions.jsonl")), tokenizer, False)
    raise ConfigError(
        f"{run} recorded no rollouts; run with {_SWITCH_ON} for tokens and log-probs, or logger.log_completions=true for text"
    )


def _dumped(folder: Path) -> Iterator[Record]:
    for scope in ("rollout", "eval-rollout"):
        versions = (p for p in (folder / scope).glob("*") if p.name.isdigit())
        paths = [path for version in versions for path in version.glob("*.jsonl")]
        newest: dict[str, int] = {}  # group -> when it was written last, in whatever version
        for path in paths:
            newest[path.name] = max(newest.get(path.name, 0), path.stat().st_mtime_ns)
        for path in sorted(paths, key=lambda p: (int(p.parent.name), int(p.stem))):
            if scope == "rollout" and path.stat().st_mtime_ns < newest[path.name]:
                continue  # played again after a resume, by another version
            for line in read_lines(path):
                yield Record(line, scope, int(path.parent.name))


def last_of_each(records: Iterable[Record]) -> list[Record]:
    """The records of each group as it was played last: a resumed run plays again what its checkpoint does not know.

    Evaluations number their groups alike for every version, so there each version has its own.
    """
    found: dict[Any, list[Record]] = {}
    before: tuple[Any, tuple[int, int]] = (None, (0, 0))
    for record in records:
        key = (record.scope, record.fields["task_id"], record.version if record.scope == "eval-rollout" else None)
        place = (record.fields["rollout_id"], record.fields.get("sample_idx", 0))
        if key != before[0] or place <= before[1]:
            found.pop(key, None)  # it stands where it was played last
            found[key] = []
        found[key].append(record)
        before = (key, place)
    return [record for group in found.values() for record in group]


def _with_trained(records: list[Record], run: Path) -> list[Record]:
    """The records with what the trainer made of them, where it trained them; the last time counts."""
    trained = {
        (line["task_id"], line["rollout_id"], line["row"]): line
        for path in sorted((run / "trained").glob("rank-*.jsonl"))
        for line in read_lines(path)
    }
    found = []
    for record in records:
        fields = record.fields
        line = trained.get(
            (fields["task_id"], fields["rollout_id"], row_digest(np.array(fields["token_ids"])[loss_mask(fields)]))
        )
        if line is not None:
            record = dataclasses.replace(record, step=line["step"], trainer_logprobs=line["trainer_logprobs"])
        found.append(record)
    return found


def loss_mask(fields: dict[str, Any]) -> np.ndarray:
    """[L] bool from the run lengths of a record."""
    values, counts = zip(*fields["mask_rle"], strict=True)
    return np.repeat(np.array(values, np.bool_), counts)


def _completions(path: Path) -> Iterator[Record]:
    group, slot = None, -1
    for line in read_lines(path):
        slot = line.get("slot", slot + 1 if line["group"] == group else 0)
        group = line["group"]
        rewards = line["rewards"]
        given = [v for v in rewards.values() if v is not None]
        fields = {
            "task_id": line["group"],
            "rollout_id": slot,
            "rewards": rewards,
            "reward": sum(given) if given else None,
            "advantage": line["advantage"],
            "dropped": line["dropped"],
        }
        yield Record(fields, "rollout", line["version"], [*line["prompt"], *line["completion"]])
