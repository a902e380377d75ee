"""One generation request inside the engine, and what it has produced so far."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agrpo.serve.sampling import SamplingParams

if TYPE_CHECKING:
    from agrpo.serve.cache import Pool
    from agrpo.serve.lora import Adapter

_order = itertools.count()


@dataclass(slots=True, eq=False)
class Request:
    """Owned by the engine's thread from `submit` until `on_done` is called."""

    request_id: str
    prompt_ids: list[int]
    max_tokens: int
    params: SamplingParams
    stop_ids: frozenset[int]
    on_done: Callable[[Request], None]
    adapter: Adapter | None = None

    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    head_ids: list[list[int]] = field(default_factory=list)
    head_logprobs: list[list[float]] = field(default_factory=list)
    candidates: list[list[int] | None] = field(default_factory=list)
    versions: list[tuple[str, int, int]] = field(default_factory=list)  # label, first token, one past the last
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    error: str = ""
    order: int = field(default_factory=_order.__next__)  # of arrival
    pool: Pool | None = None
    slot: int = -1
    states: dict[int, tuple] = field(default_factory=dict)  # layer -> what a linear layer remembers of the context

    @property
    def length(self) -> int:
        """Tokens of the context so far."""
        return len(self.prompt_ids) + len(self.output_ids)

    def emit(self, draws, row: int, version: str | None) -> None:
        """Take one drawn token; decides whether the turn ends here."""
        token_id, index = draws.token_ids[row], len(self.output_ids)
        self.output_ids.append(token_id)
        self.logprobs.append(draws.logprobs[row])
        self.ranks.append(draws.ranks[row])
        if self.params.num_logprobs:
            self.head_ids.append(draws.head_ids[row])
            self.head_logprobs.append(draws.head_logprobs[row])
        if self.params.is_truncated:
            self.candidates.append(draws.candidates[row])
        if version is not None:
            last = self.versions[-1] if self.versions else None
            if last is not None and last[0] == version and last[2] == index:
                self.versions[-1] = (version, last[1], index + 1)
            else:
                self.versions.append((version, index, index + 1))
        if token_id in self.stop_ids:
            self.finish_reason = "stop"
        elif len(self.output_ids) >= self.max_tokens:
            self.finish_reason = "length"
