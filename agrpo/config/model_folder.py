"""What a model's small files tell before any weight is loaded: refusals (COMPAT 10, 11, 12, 20)."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agrpo.sections import Model

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
LAYER_KINDS = ("full_attention", "sliding_attention", "linear_attention")


def model_problems(model: Model) -> Iterator[str]:
    """Refusals that need no more than the folder's listing and its config.json."""
    folder = Path(model.path).expanduser()
    looks_local = model.path.startswith((".", "/", "~")) or folder.exists()
    if looks_local:
        yield from _folder_problems(folder)
    elif not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model.path):
        yield f"model.path: {model.path} is neither a folder nor a Hub id (owner/name)"
    config = read_config(model.path)
    if config is not None:
        yield from _architecture_problems(model, config)


def _folder_problems(folder: Path) -> Iterator[str]:
    if not folder.is_dir():
        yield f"model.path: {folder} does not exist; give a folder written by save_pretrained, or a Hub id (owner/name)"
        return
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    if not any(next(folder.glob(pattern), None) for pattern in WEIGHTS):
        missing.append("weights (*.safetensors)")
    if missing:
        yield f"model.path: folder {folder} has no {' and no '.join(missing)}; give {_instead(folder)}"


def _instead(folder: Path) -> str:
    if (folder / "model" / "config.json").is_file():
        return f"the model in it: {folder / 'model'}"
    if (folder / "checkpoints").is_dir():
        return f"what this writes: agrpo export {folder} --output FOLDER"
    return "a folder written by save_pretrained"


def _architecture_problems(model: Model, config: dict[str, Any]) -> Iterator[str]:
    text = config.get("text_config") or config
    kinds = set(text.get("layer_types") or [])
    unknown = sorted(kinds - set(LAYER_KINDS))
    if unknown:
        yield f"model.path: layers of kind {', '.join(unknown)} are not supported; allowed: {', '.join(LAYER_KINDS)}"
    if "linear_attention" in kinds and _version("transformers") < (5, 15, 0):
        yield "model.path: Gated DeltaNet layers need transformers 5.15.0 or newer; run: pip install -U transformers"
    if text.get("model_type") == "gpt_oss":
        yield "model.path: models with attention sinks are not supported"  # COMPAT-10
    if model.router_aux_loss_coef is not None and not num_experts(text):
        yield "model.router_aux_loss_coef is for mixture-of-experts models; this one is dense: leave it null"


def config_file(path: str) -> Path | None:
    """The config.json of a model folder or of a model in the Hugging Face cache; None if it is not on this machine."""
    folder = Path(path).expanduser()
    candidates = [folder / "config.json"]
    if not folder.exists():
        home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
        cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
        candidates = sorted((cache / f"models--{path.replace('/', '--')}" / "snapshots").glob("*/config.json"))
    return next((file for file in reversed(candidates) if _read(file) is not None), None)


def read_config(path: str) -> dict[str, Any] | None:
    """What `config_file` holds."""
    file = config_file(path)
    return None if file is None else _read(file)


def _read(file: Path) -> dict[str, Any] | None:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return None


def num_experts(text: Mapping[str, Any]) -> int:
    """Experts of a layer by any of its names; 0 for a dense model."""
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return next((int(text[name]) for name in names if text.get(name)), 0)


def _version(package: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", importlib.metadata.version(package))[:3])
