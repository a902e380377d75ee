"""What a checkpoint holds beside the weights (RES-1 to RES-9)."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agrpo import wire
from agrpo.config.checkpoint_folder import complete
from agrpo.errors import ConfigError
from agrpo.model import checkpoint as checkpoints
from agrpo.train.feeder import FeederState
from agrpo.types import ReadyGroup

STATE, READY, LOOP = "rollout_state.json", "ready_groups.bin", "loop_state.msgpack"
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Progress:
    """Counters of a run that continue over a resume."""

    step: int = 0  # optimizer steps done
    version: int = 0  # weight syncs completed
    num_tokens: int = 0  # unique tokens forwarded
    is_synced: bool = False  # the weights are those of `version`
    ledger: dict[str, Any] | None = None
    ready: tuple[ReadyGroup, ...] = ()
    loop_state: bytes | None = None  # of the user's rollout loop
    callbacks: dict[str, Any] = field(default_factory=dict)  # states of the user's callbacks, by import path


def restore(
    folder: Path, model: Any, updater: Any, run: Any, fingerprint: str | None, order: str | None = None
) -> Progress:
    """Load a checkpoint into the model and the updater; collective. Raises ConfigError for other data, and for the same in
    another order, where the resolved groups would be other prompts (RES-8)."""
    try:
        files = checkpoints.load(folder, model, updater)
        groups = tuple(wire.frames((folder / READY).read_bytes())) if (folder / READY).exists() else ()
    except ConfigError:
        raise
    except (Exception, checkpoints.CheckpointException) as error:  # whatever the reader of a damaged file makes of it
        raise ConfigError(_unreadable(folder, error)) from error
    state = files.get(STATE)
    if state is None:
        _log.warning("%s has no %s: prompts start from the first one", folder, STATE)  # RES-7
        return Progress(step=int(folder.name.rsplit("-", 1)[-1]))
    ledger = state["ledger"]
    if change := _change_of_data(state, fingerprint, order):
        if not run.allow_dataset_change:
            raise ConfigError(f"run.resume: {folder} has {change}, or start them over with run.allow_dataset_change=true")
        ledger = {**ledger, "resolved": [], "reasons": {}}
        return Progress(**_counters(state), ledger=ledger)
    _log.info("resumed from %s: step %d, version %d, %d ready groups", folder, state["step"], state["version"], len(groups))
    loop_state = (folder / LOOP).read_bytes() if (folder / LOOP).exists() else None
    return Progress(**_counters(state), ledger=ledger, ready=groups, loop_state=loop_state)


def _change_of_data(state: dict[str, Any], fingerprint: str | None, order: str | None) -> str | None:
    """What is not as it was, and what to do; None where the data are the same, or one side does not know."""
    was = state["fingerprint"], state.get("order")
    if None not in (was[0], fingerprint) and was[0] != fingerprint:
        return f"other data (fingerprint {was[0]}, now {fingerprint}); restore them"
    if None not in (was[1], order) and was[1] != order:
        return f"its data in the order of {was[1]}, now {order}; set the same again"
    return None


def _unreadable(folder: Path, error: Exception) -> str:
    """One line with what to do: an older checkpoint where there is one."""
    older = [p for p in complete(folder.parent) if p.name < folder.name]
    remedy = f"resume from the one before with run.resume={older[-1]}" if older else "start without run.resume"
    return f"run.resume: {folder} is damaged or belongs to another model ({checkpoints.fault_in_words(error)}); {remedy}"


def _counters(state: dict[str, Any]) -> dict[str, Any]:
    counters = {name: state[name] for name in ("step", "version", "num_tokens", "is_synced")}
    return {**counters, "callbacks": state.get("callbacks", {})}


def save(
    folder: Path,
    model: Any,
    updater: Any,
    section: Any,
    progress: Progress,
    fed: FeederState | None,
    fingerprint: str | None,
    order: str | None = None,
) -> None:
    """Write one checkpoint; collective. `fed` is the feeder's state on rank 0, None elsewhere."""
    files: dict[str, Any] = {}
    if fed is not None:
        ledger, ready, loop_state = fed
        files[STATE] = {
            "step": progress.step,
            "version": progress.version,
            "num_tokens": progress.num_tokens,
            "is_synced": progress.is_synced,
            "callbacks": progress.callbacks,
            "fingerprint": fingerprint,
            "order": order,
            "ledger": ledger,
        }
        if section.save_ready_groups:
            files[READY] = ready
        if loop_state is not None:
            files[LOOP] = loop_state
    checkpoints.save(folder, model, None if section.save_only_model else updater, files)
    checkpoints.prune(folder.parent, section.save_total_limit)
