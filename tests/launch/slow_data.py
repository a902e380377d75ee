"""A data set that takes long to read, as one that is fetched does."""

from __future__ import annotations

import time
from dataclasses import dataclass

from agrpo.data.jsonl import Jsonl


@dataclass(frozen=True, kw_only=True, slots=True)
class Slow(Jsonl):
    """A JSONL file behind a slow line."""

    def open(self, needs_prompt: bool = True):
        time.sleep(60)
