"""What a rank sends at a weight sync, and how: merged weights by the chosen mechanism, or the adapter alone (LORA-2)."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from agrpo.errors import AgrpoError
from agrpo.model.adapter import adapter_config, merged_only_reason, write_adapter
from agrpo.model.weights import adapter_tensors, full_tensors
from agrpo.sync.adapter import AdapterNames, AdapterSession, Choice, choose
from agrpo.sync.control import ServerControl
from agrpo.sync.session import of_rank_0
from agrpo.train.ranks import Ranks

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sender:
    """One rank's half of every sync."""

    session: Any
    weights: Callable[[], Iterator[tuple[str, torch.Tensor]]]
    names: AdapterNames | None  # None where the servers' own weights are the policy

    def name_of(self, version: int) -> str | None:
        return self.names.of_version(version) if self.names is not None else None

    @property
    def prefix(self) -> str:
        """What the rollout process derives adapter names from; empty without adapters."""
        return self.names.prefix if self.names is not None else ""


def open_sender(
    config: Any, server: ServerControl, model: torch.nn.Module, run_dir: Path, run_id: str, ranks: Ranks
) -> Sender:
    """Decided once, on rank 0, and the same on all ranks; the reason is logged. Raises what `choose` raises."""
    lora, staleness = config.model.lora, config.rollout.max_staleness

    def decide() -> Choice:
        reason = merged_only_reason(model, lora) if lora.enabled else None
        return choose(server, config.sync.mode, lora, reason, staleness)

    choice = _of_first(decide, ranks)
    if lora.enabled:
        is_fallback = not choice.sends_adapter and config.sync.mode == "auto"
        level = logging.WARNING if is_fallback else logging.INFO
        _log.log(level, "weight sync sends %s: %s", "the adapter" if choice.sends_adapter else "merged weights", choice.reason)
    if not choice.sends_adapter:
        session = config.sync.open(server, run_dir, ranks.device, ranks.rank, ranks.world_size)
        return Sender(session, functools.partial(full_tensors, model), None)
    names = AdapterNames.of(run_dir, run_id)
    description = adapter_config(model)
    session = AdapterSession(
        server,
        names,
        run_dir,
        lambda folder, tensors: write_adapter(folder, description, tensors),
        rank=ranks.rank,
        world_size=ranks.world_size,
        max_staleness=staleness,
        verify_every=config.sync.verify_every,
    )
    return Sender(session, functools.partial(adapter_tensors, model), names)


def _of_first(decide: Callable[[], Choice], ranks: Ranks) -> Choice:
    """What rank 0 decides, or raises, on every rank."""
    result: Choice | AgrpoError | None = None
    if ranks.is_first:
        try:
            result = decide()
        except AgrpoError as error:
            result = error
    result = of_rank_0(result, ranks.world_size)
    if isinstance(result, AgrpoError):
        raise result
    return result
