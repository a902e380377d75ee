"""Prompts through the `datasets` library: a data set on the Hub, or local files and folders it reads.

A data set on the Hub is looked at only when it is opened, so that a dry run needs no network; local data are checked before.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agrpo.data.fingerprint import content_digest
from agrpo.data.rows import digest, gives_prompts, no_prompt_column, prompt_fault, refuse
from agrpo.errors import ConfigError
from agrpo.schema import setting

INSTALL = 'pip install "agrpo[hub]"'
BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}
CHECK_BATCH_ROWS = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Hub:
    """A data set of the Hugging Face Hub, or a local file or folder read with `datasets`."""

    path: str = setting(doc="data set on the Hugging Face Hub, or a local file or folder that `datasets` reads")
    name: str | None = setting(None, "configuration of the data set")
    split: str = setting("train", "split of the data set")
    streaming: bool = setting(False, "read while training instead of downloading first; no length, no shuffling")
    shuffle: bool = setting(False, "visit the rows in a new order every epoch instead of data order")
    seed: int | None = setting(None, "seed of the order; null = run.seed", ge=0)

    def open(self, needs_prompt: bool = True) -> HubRows | HubStream:
        refuse(self._setting_problems())
        dataset = self._load()
        refuse(self._data_problems(dataset, needs_prompt))
        return HubStream(dataset, self.path) if self.streaming else HubRows(dataset)

    @property
    def is_endless(self) -> bool:
        return self.streaming

    def columns(self) -> list[str] | None:
        if self._setting_problems() or not self._is_local():
            return None
        try:
            return list(self._load().column_names or []) or None
        except ConfigError:
            return None

    def problems(self, config: Any) -> list[str]:
        lines = self._setting_problems()
        if self.streaming and config.run.max_steps is None:
            lines.append("run.max_steps must be set (>= 1) with data.streaming=true: a stream has no epoch to end the run")
        if lines or not self._is_local():
            return lines
        try:
            dataset = self._load()
        except ConfigError as error:
            return error.problems
        return self._data_problems(dataset, not gives_prompts(config))

    def _is_local(self) -> bool:
        return Path(self.path).expanduser().exists()

    def _setting_problems(self) -> list[str]:
        lines = []
        if self.streaming and self.shuffle:
            lines.append("data.shuffle must be false with data.streaming=true: a stream has no order to permute")
        if importlib.util.find_spec("datasets") is None:
            lines.append(f"data: package `datasets` is not installed; run: {INSTALL}")
        looks_like_path = self.path.startswith((".", "/", "~")) or Path(self.path).suffix in BUILDERS
        if not self._is_local() and (looks_like_path or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", self.path)):
            lines.append(
                f"data.path: {self.path} does not exist; give a data set of the Hub (owner/name), a file or a folder"
            )
        return lines

    def _load(self) -> Any:
        path = Path(self.path).expanduser()
        signature = path.stat().st_mtime_ns if path.exists() else 0
        try:
            return _load(self.path, self.name, self.split, self.streaming, signature)
        except ConfigError:
            raise
        except Exception as error:  # whatever the library raises is one line for the user
            raise ConfigError(_load_problem(self.path, self.name, self.split, error)) from error

    def _data_problems(self, dataset: Any, needs_prompt: bool) -> list[str]:
        columns = dataset.column_names  # None where a stream does not know them
        if columns is not None and "prompt" not in columns:
            return [no_prompt_column(self.path, list(columns))] if needs_prompt else []
        if self.streaming:
            return []
        if not len(dataset):
            return [f"data.path: {self.path} split {self.split} holds no rows"]
        return self._prompt_problems(dataset, needs_prompt)

    def _prompt_problems(self, dataset: Any, needs_prompt: bool) -> list[str]:
        """The first row whose prompt has the wrong shape."""
        first = 0
        for batch in dataset.select_columns(["prompt"]).iter(batch_size=CHECK_BATCH_ROWS):
            for offset, prompt in enumerate(batch["prompt"]):
                fault = prompt_fault(_without_nulls(prompt))
                if fault and (prompt or needs_prompt):
                    return [f"data.path: {self.path} row {first + offset}: prompt {fault}"]
            first += len(batch["prompt"])
        return []


class HubRows:
    """A map-style data set; its fingerprint is of every value, whatever file format or cache the library read them from."""

    def __init__(self, dataset: Any):
        self._dataset = dataset

    @functools.cached_property
    def fingerprint(self) -> str:
        # Read by the trainer alone; every process opens the data, and hashing all of it takes its time.
        return f"{len(self._dataset)}-{content_digest(self._dataset)}"

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return _row(self._dataset[index])


class HubStream:
    """Streaming data: no length, no position."""

    def __init__(self, dataset: Any, path: str):
        self._dataset = dataset
        self.fingerprint = f"stream-{digest(path.encode())}"

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (_row(row) for row in self._dataset)


def _row(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "prompt": _without_nulls(row.get("prompt")) or []}


def _without_nulls(prompt: Any) -> Any:
    """Messages without the null keys that a table adds when other rows have them (tool_calls, name)."""
    if not isinstance(prompt, list):
        return prompt
    return [{k: v for k, v in m.items() if v is not None} if isinstance(m, dict) else m for m in prompt]


@functools.lru_cache(maxsize=2)
def _load(path: str, name: str | None, split: str, streaming: bool, signature: int) -> Any:
    import datasets

    datasets.disable_progress_bars()
    local = Path(path).expanduser()
    if local.is_file():
        builder = BUILDERS.get(local.suffix)
        if builder is None:
            raise ConfigError(f"data.path: {path} has no known ending; allowed: {', '.join(BUILDERS)}")
        if split != "train":
            raise ConfigError(
                f"data.split: {split} is not a split of {path}; allowed: train (a single file has no other)"
            )
        return datasets.load_dataset(builder, data_files=str(local), split="train", streaming=streaming)
    if (local / "state.json").is_file() or (local / "dataset_dict.json").is_file():
        return _saved(local, path, split, streaming)
    return datasets.load_dataset(str(local) if local.exists() else path, name, split=split, streaming=streaming)


def _saved(folder: Path, path: str, split: str, streaming: bool) -> Any:
    """A folder written by `save_to_disk`."""
    import datasets

    loaded = datasets.load_from_disk(str(folder))
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise ConfigError(f"data.split: {split} is not a split of {path}; allowed: {', '.join(loaded)}")
        loaded = loaded[split]
    return loaded.to_iterable_dataset() if streaming else loaded


def _load_problem(path: str, name: str | None, split: str, error: Exception) -> str:
    text = str(error)
    splits = re.search(r"Should be one of \[(.*?)\]|Available splits: \[(.*?)\]", text)
    if splits:
        return f"data.split: {split} is not a split of {path}; allowed: {(splits[1] or splits[2]).replace(chr(39), '')}"
    names = re.search(r"BuilderConfig .* not found\. Available: \[(.*?)\]", text) or re.search(
        r"Config name is missing\.\s*Please pick one among the available configs: \[(.*?)\]", text
    )
    if names:
        return f"data.name: {name} is not a configuration of {path}; allowed: {names[1].replace(chr(39), '')}"
    first = text.strip().splitlines()[0] if text.strip() else ""
    return (
        f"data.path: {path} cannot be loaded: {type(error).__name__}: {first}; check the name, the network and HF_TOKEN"
    )
