"""Checkpoints that a run resumes from, and the exported Hugging Face folder.

    <run_dir>/checkpoints/step-000040/   shards/      trained weights and optimizer, readable by any number of ranks
                                         adapter/     a LoRA adapter in PEFT's format, where one is trained
                                         rng-<rank>.pt
                                         updater.json and the caller's own JSON files

A checkpoint is written under a name that starts with a dot and renamed when every rank is done: a kill at any moment
leaves the previous one usable (RES-11).
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.checkpoint.api import CheckpointException

from agrpo.config.checkpoint_folder import SHARDS, UPDATER, complete, fault, is_complete
from agrpo.errors import ConfigError, ServerError
from agrpo.lifecycle import NO_SPACE
from agrpo.model import folders
from agrpo.model.adapter import CONFIG_FILE, adapter_config, has_adapter, write_adapter
from agrpo.model.optim import Updater
from agrpo.model.shard import COMPUTE_DTYPES
from agrpo.model.shards import ShardReader
from agrpo.model.weights import adapter_tensors, gathered, plain_tensors

ADAPTER = "adapter"
_log = logging.getLogger(__name__)
# What a resumed run must share with the run that saved, to find its tensors and to go on as before.
_SHAPE_OF_ADAPTER = {"r": "r", "lora_alpha": "alpha", "target_modules": "target_modules", "use_dora": "options.use_dora"}
_NO_SPACE_TEXTS = (*map(os.strerror, sorted(NO_SPACE)), "PytorchStreamWriter failed writing file")
_FROZEN_STAY = dcp_state.StateDictOptions(strict=False)  # frozen weights are those of model.path


def folder_of(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:06d}"


def save(folder: Path, model: torch.nn.Module, updater: Updater | None, files: dict[str, Any]) -> None:
    """Write one checkpoint; collective. `files`: JSON or binary, by name; without `updater` it cannot be resumed."""
    rank, beside = _rank(), folder.with_name(f".{folder.name}")
    if rank == 0:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
    _barrier()
    remedy = (
        "so no checkpoint was written and the ones before stay as they were; free space, or set "
        "checkpoint.save_total_limit, then continue with run.resume=auto"
    )
    with _named_if_full(beside, remedy):
        with _alone_is_intended():
            dcp.save(_state(model, updater), checkpoint_id=beside / SHARDS, no_dist=not dist.is_initialized())
        torch.save(_rng_state(), beside / f"rng-{rank}.pt")
        if has_adapter(model):
            _write_adapter(model, beside / ADAPTER)
        if rank == 0:
            own = {} if updater is None else {UPDATER: updater.state_dict()}
            for name, content in {**files, **own}.items():
                is_binary = isinstance(content, bytes)
                (beside / name).write_bytes(content if is_binary else json.dumps(content).encode())
    _barrier()
    if rank == 0:
        folders.settle(beside)
        folders.replace(folder, beside)
        for left in folder.parent.glob(".step-*"):  # by a run that was killed while it wrote one
            shutil.rmtree(left, ignore_errors=True)
    _barrier()


@contextmanager
def _named_if_full(beside: Path, remedy: str) -> Iterator[None]:
    """ServerError where the disk takes no more, whichever library wrote; what was begun is removed."""
    try:
        yield
    except (Exception, CheckpointException) as error:
        if not _is_no_space(error):
            raise
        shutil.rmtree(beside, ignore_errors=True)
        raise ServerError(f"{beside.parent}: the disk takes no more, {remedy}") from error


def _is_no_space(error: Any) -> bool:
    """Libraries wrap the system's error, or keep its text only; torch's own writer says no more than that it failed."""
    failures = [f[0] for f in getattr(error, "failures", {}).values()]
    causes = [e for e in (error.__cause__, error.__context__) if e is not None]
    if getattr(error, "errno", None) in NO_SPACE or any(text in str(error) for text in _NO_SPACE_TEXTS):
        return True
    return any(map(_is_no_space, (*failures, *causes)))


def load(folder: Path, model: torch.nn.Module, updater: Updater) -> dict[str, Any]:
    """Restore model, optimizer, schedule and random states; returns the JSON files by name. Collective.

    The number of ranks may differ from that of the run that saved (RES-1). Raises ConfigError for a folder that is no
    checkpoint or was saved without optimizer (RES-9).
    """
    if line := fault(folder):
        raise ConfigError(line)
    state = _read(folder, model, updater)
    dcp_state.set_state_dict(
        model,
        updater.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=_FROZEN_STAY,
    )
    files = {path.name: json.loads(path.read_text()) for path in folder.glob("*.json")}
    updater.load_state_dict(files.pop(UPDATER))
    rng = folder / f"rng-{_rank()}.pt"
    if rng.exists():
        _set_rng_state(torch.load(rng, weights_only=True))
    return files


def restore_weights(folder: Path, model: torch.nn.Module) -> None:
    """Only the trained weights of a checkpoint, of any kind. Raises ConfigError for a folder that is none."""
    if not is_complete(folder):
        raise ConfigError(f"{folder} is no checkpoint; give a run's folder, or one of its folders checkpoints/step-NNNNNN")
    try:
        state = _read(folder, model, None)
        dcp_state.set_model_state_dict(model, state["model"], options=_FROZEN_STAY)
    except ConfigError:
        raise
    except (Exception, CheckpointException) as error:
        others = [p.name for p in complete(folder.parent) if p.name != folder.name]
        remedy = f"take another: {', '.join(others)}" if others else "no other is beside it"
        raise ConfigError(f"{folder} is damaged or belongs to another model ({fault_in_words(error)}); {remedy}") from error


def fault_in_words(error: Any) -> str:
    """What the reader of a damaged checkpoint found, in one line; torch keeps it by rank."""
    failures = list(getattr(error, "failures", {}).values())
    cause = failures[0][0] if failures else error
    return f"{type(cause).__name__}: {cause}".rstrip(": ").splitlines()[0]


def _read(folder: Path, model: torch.nn.Module, updater: Updater | None) -> dict[str, Any]:
    """What the checkpoint's shards hold for this model, and for its optimizer where there is one; collective."""
    _check_adapter(folder, model)
    state = _state(model, updater)
    with _alone_is_intended():
        dcp.load(state, storage_reader=ShardReader(folder / SHARDS), no_dist=not dist.is_initialized())
    return state


def _check_adapter(folder: Path, model: torch.nn.Module) -> None:
    """Raises ConfigError where the checkpoint and `model.lora` differ in what is trained."""
    path = folder / ADAPTER / CONFIG_FILE
    if path.exists() != has_adapter(model):
        saved, now = ("an adapter", "true") if path.exists() else ("no adapter", "false")
        raise ConfigError(f"run.resume: {folder} holds {saved}; set model.lora.enabled={now}")
    if not path.exists():
        return
    saved, now = json.loads(path.read_text()), adapter_config(model)
    for key, name in _SHAPE_OF_ADAPTER.items():
        if saved.get(key) != now.get(key):
            raise ConfigError(
                f"run.resume: the adapter of {folder} has model.lora.{name}={saved.get(key)}, not {now.get(key)}; set the "
                "same"
            )


def prune(checkpoints: Path, limit: int | None) -> None:
    """Keep the `limit` newest complete checkpoints (RES-15); on rank 0 only, after `save`."""
    if limit is None or _rank() != 0:
        return
    for path in complete(checkpoints)[:-limit]:
        try:
            folders.remove(path)
        except OSError as error:
            _log.warning("%s could not be removed (checkpoint.save_total_limit=%d): %s", path, limit, error)


def export(model: torch.nn.Module, tokenizer: Any, path: Path, dtype: torch.dtype | None) -> None:
    """As `export_merged`; a LoRA adapter also stands alone in PEFT's format, in the folder `adapter` beside it (LORA-18)."""
    if has_adapter(model):
        _write_adapter(model, path.with_name(ADAPTER))
    export_merged(model, tokenizer, path, dtype)


def export_merged(model: torch.nn.Module, tokenizer: Any, path: Path, dtype: torch.dtype | None) -> None:
    """A folder that `from_pretrained` loads, in `dtype` (None = as is); collective, rank 0 writes (RES-14).

    A LoRA adapter is merged there. ServerError on rank 0 where the disk takes no more.
    """
    state: dict[str, torch.Tensor] = {}
    for name, full in _all_tensors(model):
        if _rank() == 0:
            state[name] = full.to("cpu", dtype if full.is_floating_point() else None, copy=True)
    try:
        if _rank() == 0:
            beside = path.with_name(f".{path.name}")
            shutil.rmtree(beside, ignore_errors=True)
            with _named_if_full(beside, "so the model was not written; free space, then agrpo export RUN"):
                beside.mkdir(parents=True)
                _write(model, tokenizer, beside, state, dtype)
            folders.replace(path, beside)
    finally:
        _barrier()  # where the others wait


def _all_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from plain_tensors(model)
    for name, buffer in _persistent_buffers(model):
        yield name, gathered(buffer)


def _write_adapter(model: torch.nn.Module, path: Path) -> None:
    """An adapter folder in place of one that may be there; collective, rank 0 writes."""
    tensors = {}
    for name, full in adapter_tensors(model):
        if _rank() == 0:
            tensors[name] = full.to("cpu")
    if _rank() != 0:
        return
    beside = path.with_name(f".{path.name}")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    write_adapter(beside, adapter_config(model), tensors)
    folders.replace(path, beside)


def export_dtype(section: Any) -> torch.dtype | None:
    """The dtype of exported weights: that of mixed precision, else as they are (RES-14)."""
    return COMPUTE_DTYPES[section.precision]


def _write(
    model: torch.nn.Module, tokenizer: Any, path: Path, state: dict[str, torch.Tensor], dtype: torch.dtype | None
) -> None:
    model.save_pretrained(path, state_dict=state)
    tokenizer.save_pretrained(path)
    if dtype is None:
        return
    # save_pretrained records the dtype of the masters, not of the state it was given.
    config = json.loads((path / "config.json").read_text())
    for section in (config, *(v for v in config.values() if isinstance(v, dict))):
        if "dtype" in section:
            section["dtype"] = str(dtype).removeprefix("torch.")
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _persistent_buffers(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    kept = model.state_dict().keys()
    return [(name, buffer) for name, buffer in model.named_buffers() if name in kept]


def _state(model: torch.nn.Module, updater: Updater | None) -> dict[str, Any]:
    """Trained weights only: frozen ones are those of `model.path`, whose size a checkpoint of an adapter need not have."""
    options = dcp_state.StateDictOptions(ignore_frozen_params=True)
    if updater is None:
        return {"model": dcp_state.get_model_state_dict(model, options=options)}
    weights, optimizer = dcp_state.get_state_dict(model, updater.optimizer, options=options)
    return {"model": weights, "optimizer": optimizer}


@contextmanager
def _alone_is_intended() -> Iterator[None]:
    """Without the library's warning that one process saves or loads alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _rng_state() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    kind, keys, *rest = np.random.get_state()
    # Tensors and plain values only: what is loaded later may come from elsewhere, and must not be able to run anything.
    of_numpy = (kind, torch.from_numpy(keys.astype(np.int64)), *rest)
    return {"python": random.getstate(), "numpy": of_numpy, "torch": torch.get_rng_state(), "cuda": cuda}


def _set_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
