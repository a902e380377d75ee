"""What a model's small files tell before any weight is loaded: refusals (COMPAT 10, 11, 12, 20) and its shape."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agrpo.sections import Model

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
LAYER_KINDS = ("full_attention", "sliding_attention", "linear_attention")


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes that memory depends on; 0 where only the number of parameters is known."""

    num_parameters: int
    hidden_size: int = 0
    num_layers: int = 0
    vocab_size: int = 0
    max_positions: int = 0
    source: str = ""


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
        yield f"model.path: folder {folder} has no {' and no '.join(missing)}; give a folder written by save_pretrained"


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
    if model.router_aux_loss_coef is not None and not _num_experts(text):
        yield "model.router_aux_loss_coef is for mixture-of-experts models; this one is dense: leave it null"


def read_config(path: str) -> dict[str, Any] | None:
    """config.json of a model folder or of a model in the Hugging Face cache; None if it is not on this machine."""
    folder = Path(path).expanduser()
    candidates = [folder / "config.json"]
    if not folder.exists():
        home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
        cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
        candidates = sorted((cache / f"models--{path.replace('/', '--')}" / "snapshots").glob("*/config.json"))
    for file in reversed(candidates):
        try:
            return json.loads(file.read_text())
        except (OSError, ValueError):
            continue
    return None


def shape_of(path: str) -> Shape | None:
    """The model's shape from its config.json, else its size from a name such as Qwen3.5-2B, else None."""
    config = read_config(path)
    if config is not None:
        return _shape({**config, **(config.get("text_config") or {})})
    match = re.findall(
        r"(?<![\w.])(\d+(?:\.\d+)?)([BMbm])(?![A-Za-z])", Path(path).name.replace("-", " ").replace("_", " ")
    )
    if not match:
        return None
    number, unit = match[-1] if len(match) == 1 else match[0]
    size = float(number) * (1e9 if unit in "Bb" else 1e6)
    return Shape(int(size), source=f"the name {Path(path).name}; config.json is not on this machine")


def _shape(text: dict[str, Any]) -> Shape:
    hidden, layers = int(text["hidden_size"]), int(text["num_hidden_layers"])
    heads = int(text["num_attention_heads"])
    head_dim = int(text.get("head_dim") or hidden // heads)
    kv_heads = int(text.get("num_key_value_heads") or heads)
    vocab = int(text["vocab_size"])
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    kinds = list(text.get("layer_types") or [])
    num_linear, linear = kinds.count("linear_attention"), 0
    if num_linear:
        attention += hidden * head_dim * heads  # the output gate of the hybrids' attention
        linear = _linear_layer(text, hidden)
    experts, width = _num_experts(text), int(text.get("moe_intermediate_size") or 0)
    mlp = 3 * hidden * int(text.get("intermediate_size") or 4 * hidden)
    if experts and width:
        mlp = 3 * hidden * (width * experts + int(text.get("shared_expert_intermediate_size") or 0)) + hidden * experts
    embeddings = vocab * hidden * (1 if text.get("tie_word_embeddings", False) else 2)
    total = embeddings + layers * (mlp + 2 * hidden) + hidden
    total += (layers - num_linear) * attention + num_linear * linear
    return Shape(total, hidden, layers, vocab, int(text.get("max_position_embeddings") or 0), "config.json")


def _num_experts(text: dict[str, Any]) -> int:
    """0 for a dense model."""
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return next((int(text[name]) for name in names if text.get(name)), 0)


def _linear_layer(text: dict[str, Any], hidden: int) -> int:
    """Weights of a Gated DeltaNet layer: projections of query, key, value, gate, rate and step, convolution, output."""
    heads, key_heads = int(text.get("linear_num_value_heads") or 32), int(text.get("linear_num_key_heads") or 16)
    keys = key_heads * int(text.get("linear_key_head_dim") or 128)
    values = heads * int(text.get("linear_value_head_dim") or 128)
    mixed = 2 * keys + values
    return hidden * (mixed + 2 * values + 2 * heads) + mixed * int(text.get("linear_conv_kernel_dim") or 4)


def _version(package: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", importlib.metadata.version(package))[:3])
