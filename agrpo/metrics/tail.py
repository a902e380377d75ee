"""What a growing JSONL file has gained since the last look."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any


class Tail:
    """New whole lines of a JSONL file, which need not exist yet; what was there before is skipped."""

    def __init__(self, path: Path):
        self._path, self.num_rows = path, 0
        self._position = path.stat().st_size if path.exists() else 0

    def new_rows(self, most: int | None = None) -> list[dict[str, Any]]:
        """The rows since the last call, oldest first; of more than `most`, the newest."""
        if not self._path.exists():
            return []
        if self._path.stat().st_size < self._position:
            self._position = 0  # a resume cut the file back
        with self._path.open("rb") as file:
            file.seek(self._position)
            lines = file.read().splitlines(keepends=True)
        complete = [line for line in lines if line.endswith(b"\n")]
        self._position += sum(map(len, complete))
        self.num_rows += len(complete)
        found = []
        for line in complete[-most if most else 0 :]:
            with contextlib.suppress(ValueError):  # what a full disk or a killed process left half-written
                found.append(json.loads(line))
        return found
