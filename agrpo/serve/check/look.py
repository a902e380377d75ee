"""One server as the rows see it: the configuration, what the server answered, and the command that would be right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agrpo.serve.check.ask import INFO, Answer
from agrpo.serve.flags import ServerCommand


@dataclass(frozen=True, slots=True)
class Row:
    """One checked thing. A failed one ends a run; `fix` is the flag or variable to start the server with."""

    url: str
    name: str
    status: str  # ok, warn, fail, or skip where nothing could be or need be asked
    found: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Affected:
    """Prompts that leave no room for a whole completion, of those looked at."""

    num_affected: int
    num_looked_at: int
    longest: int  # tokens, about


# tokens of room for a prompt -> which prompts do not fit; None = no data set of a known length
LongPrompts = Callable[[int], Affected | None]


@dataclass(frozen=True, slots=True)
class Look:
    """Everything a row may use."""

    config: Any
    url: str
    answers: dict[str, Answer]
    command: ServerCommand  # what this configuration would start here
    run_dir: Path
    long_prompts: LongPrompts = field(default=lambda room: None)

    def ok(self, name: str, found: str) -> Row:
        return Row(self.url, name, "ok", found)

    def skip(self, name: str, why: str) -> Row:
        return Row(self.url, name, "skip", why)

    def warn(self, name: str, found: str, fix: str = "") -> Row:
        return Row(self.url, name, "warn", found, fix)

    def fail(self, name: str, found: str, fix: str = "") -> Row:
        return Row(self.url, name, "fail", found, fix)

    def offers(self, path: str) -> bool:
        return path in self.answers and self.answers[path].is_there

    def value(self, path: str) -> dict[str, Any]:
        """The decoded answer of `path`; {} where there is none."""
        answer = self.answers.get(path)
        value = answer.value() if answer else None
        return value if isinstance(value, dict) else {}

    @property
    def info(self) -> dict[str, Any]:
        """The server's own configuration by section; {} without development mode."""
        info = self.value(INFO).get("vllm_config")
        return info if isinstance(info, dict) else {}

    @property
    def variables(self) -> dict[str, Any]:
        return self.value(INFO).get("vllm_env") or {}

    def section(self, name: str) -> dict[str, Any]:
        return self.info.get(name) or {}

    @property
    def base_model(self) -> dict[str, Any]:
        """The entry of the base model; adapters have a parent (SRV-10)."""
        entries = [e for e in self.value("/v1/models").get("data") or [] if not e.get("parent")]
        name = self.config.server.model_name
        return next((e for e in entries if e.get("id") == name), entries[0] if entries else {})
