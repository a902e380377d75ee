"""Prompts from JSONL: one file, or all *.jsonl files of a folder in order of name.

The lines stay as bytes and are decoded when asked for; one pass at opening checks every line and finds the columns.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from agrpo.data.rows import digest, gives_prompts, no_prompt_column, prompt_fault, refuse
from agrpo.schema import setting

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, kw_only=True, slots=True)
class Jsonl:
    """A JSONL file, or a folder of them: one object per line, `prompt` is a list of messages."""

    path: str = setting(doc="JSONL file, or folder with *.jsonl files")
    shuffle: bool = setting(False, "visit the rows in a new order every epoch instead of file order")
    seed: int | None = setting(None, "seed of the order; null = run.seed", ge=0)

    def open(self, needs_prompt: bool = True) -> JsonlRows:
        refuse(self._data_problems(needs_prompt))
        return JsonlRows(_scan(self._signature()))

    def columns(self) -> list[str] | None:
        return None if self._path_problems() else list(_scan(self._signature()).columns) or None

    def problems(self, config: Any) -> list[str]:
        return self._data_problems(not gives_prompts(config))

    def _data_problems(self, needs_prompt: bool) -> list[str]:
        lines = self._path_problems()
        if lines:
            return lines
        scan = _scan(self._signature())
        if scan.faults or not needs_prompt:
            return list(scan.faults)
        if "prompt" not in scan.columns:
            return [no_prompt_column(self.path, list(scan.columns))]
        return [scan.without_prompt] if scan.without_prompt else []

    def _files(self) -> list[Path]:
        path = Path(self.path).expanduser()
        return sorted(p for p in path.glob("*.jsonl") if p.is_file()) if path.is_dir() else [path]

    def _path_problems(self) -> list[str]:
        path = Path(self.path).expanduser()
        if not path.exists():
            return [f"data.path: {self.path} does not exist; give a JSONL file or a folder with *.jsonl files"]
        if not self._files():
            return [f"data.path: folder {self.path} contains no *.jsonl file; give a JSONL file or a folder with some"]
        for file in self._files():
            try:
                file.open("rb").close()
            except OSError as error:
                return [f"data.path: {file} cannot be read: {error.strerror}; give a readable JSONL file"]
        return []

    def _signature(self) -> tuple[tuple[str, int, int], ...]:
        """Path, size and change time of each file: a changed file is scanned anew."""
        stats = [(str(p), p.stat()) for p in self._files()]
        return tuple((name, s.st_size, s.st_mtime_ns) for name, s in stats)


@dataclass(frozen=True, slots=True)
class Scan:
    """What one pass over the files found."""

    buffers: tuple[bytes, ...]  # content of each file
    file_index: np.ndarray  # [rows] int32, file of the row
    starts: np.ndarray  # [rows] int64, first byte of the row in its file
    ends: np.ndarray  # [rows] int64
    columns: tuple[str, ...]  # union over rows, in order of appearance
    faults: tuple[str, ...]  # one line per kind of fault, naming the first offending line
    without_prompt: str  # the first row that lacks a prompt others have; empty if none
    fingerprint: str


class JsonlRows:
    """Rows of the scanned files; a column that a row lacks is None."""

    def __init__(self, scan: Scan):
        self._scan = scan
        self._decode = msgspec.json.Decoder(dict[str, Any]).decode
        self.fingerprint = scan.fingerprint

    def __len__(self) -> int:
        return len(self._scan.starts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        scan = self._scan
        view = memoryview(scan.buffers[scan.file_index[index]])
        row = self._decode(view[scan.starts[index] : scan.ends[index]])
        full = {name: row.get(name) for name in scan.columns}
        return {**full, "prompt": full.get("prompt") or []}


@functools.lru_cache(maxsize=2)
def _scan(files: tuple[tuple[str, int, int], ...]) -> Scan:
    buffers = tuple(Path(name).read_bytes() for name, _, _ in files)
    bounds = [_line_bounds(buffer) for buffer in buffers]
    checks = _Checks()
    for (name, _, _), buffer, (starts, ends, numbers) in zip(files, buffers, bounds, strict=True):
        checks.read(Path(name).name, buffer, starts, ends, numbers)
    lengths = [len(starts) for starts, _, _ in bounds]
    if not sum(lengths):
        checks.faults["empty"] = f"data.path: {files[0][0]} holds no rows; give a file with one JSON object per line"
    return Scan(
        buffers=buffers,
        file_index=np.repeat(np.arange(len(files), dtype=np.int32), lengths),
        starts=np.concatenate([b[0] for b in bounds]),
        ends=np.concatenate([b[1] for b in bounds]),
        columns=tuple(checks.columns),
        faults=tuple(checks.faults.values()),
        without_prompt=checks.without_prompt if "prompt" in checks.columns else "",
        fingerprint=f"{sum(lengths)}-{digest(*buffers)}",
    )


def _line_bounds(buffer: bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Start, end and line number of every line that is not blank: b'{}\\n\\n{}' gives starts 0 4, ends 2 6, numbers 1 3."""
    breaks = np.flatnonzero(np.frombuffer(buffer, np.uint8) == ord("\n"))
    starts = np.concatenate([[0], breaks + 1]).astype(np.int64)
    ends = np.concatenate([breaks, [len(buffer)]]).astype(np.int64)
    if buffer.startswith(BYTE_ORDER_MARK):
        starts[0] = len(BYTE_ORDER_MARK)
    # Only short lines can be blank; looking at them alone keeps the pass at array speed.
    blank = np.array(
        [e - s < 64 and not buffer[s:e].strip() for s, e in zip(starts.tolist(), ends.tolist(), strict=True)]
    )
    keep = np.flatnonzero(~blank)
    return starts[keep], ends[keep], keep + 1


class _Checks:
    """Columns and first faults, collected over all files."""

    def __init__(self) -> None:
        self.columns: dict[str, None] = {}
        self.faults: dict[str, str] = {}  # kind -> line of text
        self.without_prompt = ""
        self._decode = msgspec.json.Decoder(dict[str, Any]).decode

    def read(self, name: str, buffer: bytes, starts: np.ndarray, ends: np.ndarray, numbers: np.ndarray) -> None:
        view, known = memoryview(buffer), self.columns
        for start, end, number in zip(starts.tolist(), ends.tolist(), numbers.tolist(), strict=True):
            where = f"{name} line {number}"
            try:
                row = self._decode(view[start:end])
            except msgspec.ValidationError:
                self._fault("object", f"{where} is not a JSON object; every line must be one object with a `prompt`")
                continue
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                self._fault("json", f"{where} is not valid JSON: {error}; correct or remove the line")
                continue
            if len(row) != len(known) or row.keys() != known.keys():
                known.update(dict.fromkeys(row))
            self._read_prompt(where, row.get("prompt"))

    def _read_prompt(self, where: str, prompt: Any) -> None:
        if prompt is None:
            self.without_prompt = self.without_prompt or (
                f"data.path: {where} has no prompt; every row needs a `prompt` with messages, or env.factory must give it"
            )
        elif fault := prompt_fault(prompt):
            self._fault("prompt", f"{where}: prompt {fault}")

    def _fault(self, kind: str, text: str) -> None:
        self.faults.setdefault(kind, f"data.path: {text}")
