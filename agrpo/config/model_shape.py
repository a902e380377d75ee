"""How large a model is, from its small files alone: headers of its weights, config.json, or a size in its name."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agrpo.config.model_defaults import text_config
from agrpo.config.model_folder import config_file, num_experts, read_config

_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_PLAIN_MLP = ("starcoder2", "phi", "gpt_neox", "nemotron")  # two matrices; the others' are gated and have three
_OTHER_TOWERS = ("vision", "visual", "audio", "projector", "connector")  # parts of a checkpoint that stay frozen
_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes that memory depends on; 0 and None where only the number of parameters is known."""

    num_parameters: int
    hidden_size: int = 0
    num_layers: int = 0
    vocab_size: int = 0
    max_positions: int = 0
    source: str = ""
    num_frozen: int = 0  # of the parameters, those of towers for images and sound
    text: Mapping[str, Any] | None = None  # the text model's config.json with its class's defaults


def shape_of(path: str) -> Shape | None:
    """The model's shape from its own files, else its size from a name such as Qwen3.5-2B, else None."""
    config = read_config(path)
    text = text_config(config) if config is not None else {}
    if not all(text.get(key) for key in _NEEDED):
        missing = ", ".join(key for key in _NEEDED if not text.get(key))
        return _named(path, "config.json is not on this machine" if config is None else f"config.json tells no {missing}")
    stored = None if config.get("quantization_config") else _stored(config_file(path).parent, bool(text.get("tie_word_embeddings")))
    count, frozen = stored or (num_parameters(text), 0)
    return Shape(
        num_parameters=count,
        hidden_size=int(text["hidden_size"]),
        num_layers=int(text["num_hidden_layers"]),
        vocab_size=int(text["vocab_size"]),
        max_positions=int(text.get("max_position_embeddings") or 0),
        source="its weights" if stored else "config.json",
        num_frozen=frozen,
        text=text,
    )


def _named(path: str, reason: str) -> Shape | None:
    name = Path(path).name
    match = re.findall(r"(?<![\w.])(\d+(?:\.\d+)?)([BMbm])(?![A-Za-z])", name.replace("-", " ").replace("_", " "))
    if not match:
        return None
    number, unit = match[-1] if len(match) == 1 else match[0]
    return Shape(int(float(number) * (1e9 if unit in "Bb" else 1e6)), source=f"the name {name}; {reason}")


def _stored(folder: Path, is_tied: bool) -> tuple[int, int] | None:
    """Parameters in a folder's safetensors, and how many of them stay frozen, by their headers; None where one is missing."""
    index, total, frozen = folder / "model.safetensors.index.json", 0, 0
    try:
        names = {"model.safetensors"}
        if index.is_file():
            names = set(json.loads(index.read_text())["weight_map"].values())
        for name, tensor in (item for file in sorted(names) for item in _header(folder / file)):
            if tensor["dtype"] not in _FLOATS or is_tied and name.endswith("lm_head.weight"):
                continue
            size = math.prod(tensor["shape"])
            total += size
            frozen += size if any(word in name for word in _OTHER_TOWERS) else 0
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return (total, frozen) if total else None


def _header(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and shapes of a safetensors file: 8 bytes of length, then JSON."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > file.stat().st_size:
            raise ValueError(f"{file} is no safetensors file")
        header = json.loads(stream.read(length))
    return ((name, tensor) for name, tensor in header.items() if name != "__metadata__")


def num_parameters(text: Mapping[str, Any]) -> int:
    """Weights of the decoder, its embeddings and its head; biases, small beside them, are left out."""
    hidden, layers = int(text["hidden_size"]), int(text["num_hidden_layers"])
    embeddings = int(text["vocab_size"]) * hidden * (1 if text.get("tie_word_embeddings") else 2)
    kinds = _kinds(text, layers)
    total = embeddings + hidden
    for index in range(layers):
        mixer = _linear_layer(text, hidden) if kinds[index] == "linear_attention" else _attention(text, hidden, kinds)
        total += mixer + _mlp(text, index, hidden) + 2 * hidden
    return total


def _kinds(text: Mapping[str, Any], layers: int) -> list[str]:
    """The kind of each layer; hybrids that do not list theirs have full attention in every fourth."""
    listed = list(text.get("layer_types") or [])
    if len(listed) >= layers:
        return listed
    interval = int(text.get("full_attention_interval") or 4) if text.get("linear_num_value_heads") else 1
    return ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)]


def _attention(text: Mapping[str, Any], hidden: int, kinds: list[str]) -> int:
    heads = int(text["num_attention_heads"])
    if text.get("kv_lora_rank"):
        return _latent_attention(text, hidden, heads)
    head_dim = int(text.get("head_dim") or hidden // heads)
    kv_heads = int(text.get("num_key_value_heads") or heads)
    gate = heads if "linear_attention" in kinds else 0  # the output gate of the hybrids' attention
    return hidden * head_dim * (2 * heads + 2 * kv_heads + gate)


def _latent_attention(text: Mapping[str, Any], hidden: int, heads: int) -> int:
    """Queries, keys and values by way of a narrow vector, as in DeepSeek-V3."""
    rope, nope, value = (int(text.get(k) or 0) for k in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    narrow, queries = int(text["kv_lora_rank"]), int(text.get("q_lora_rank") or 0)
    query = queries * (hidden + heads * (nope + rope)) if queries else hidden * heads * (nope + rope)
    return query + hidden * (narrow + rope) + narrow * heads * (nope + value) + heads * value * hidden


def _mlp(text: Mapping[str, Any], index: int, hidden: int) -> int:
    matrices = 2 if text.get("model_type") in _PLAIN_MLP else 3
    experts = num_experts(text)
    dense = int(text.get("intermediate_size") or 4 * hidden)
    first = int(text.get("first_k_dense_replace") or text.get("moe_layer_start_index") or 0)
    step = int(text.get("decoder_sparse_step") or text.get("moe_layer_interval") or 1)
    if not experts or index < first or index in (text.get("mlp_only_layers") or ()) or (index + 1) % step:
        return matrices * hidden * dense
    width = int(text.get("moe_intermediate_size") or dense)
    shared = int(text.get("shared_expert_intermediate_size") or 0)
    shared += int(text.get("n_shared_experts") or text.get("moe_num_shared_experts") or 0) * width
    return matrices * hidden * (width * experts + shared) + hidden * experts


def _linear_layer(text: Mapping[str, Any], hidden: int) -> int:
    """Weights of a Gated DeltaNet layer: projections of query, key, value, gate, rate and step, convolution, output."""
    heads, key_heads = int(text.get("linear_num_value_heads") or 32), int(text.get("linear_num_key_heads") or 16)
    keys = key_heads * int(text.get("linear_key_head_dim") or 128)
    values = heads * int(text.get("linear_value_head_dim") or 128)
    mixed = 2 * keys + values
    return hidden * (mixed + 2 * values + 2 * heads) + mixed * int(text.get("linear_conv_kernel_dim") or 4)
