"""What one trainer rank holds at the peak of a step, estimated before anything is loaded; imports no torch.

Per token and decoder layer, backward needs these values in the precision of forward: 6 hidden (input, normalised and scaled
input of two norms; 14 where norms compute in float32 beside 16 bits), 4 heads * head_dim and 4 kv_heads * head_dim (before and
after norm and rotation, output), 4 intermediate (gate, its activation, up, product). With gradient checkpointing a layer keeps
its input alone, and one layer at a time has all of them. Gradients are there during forward only from the second microbatch on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agrpo.config.model_folder import num_experts

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "auto": 2, None: 4}
SLICE_LOGITS = {"cpu": 1 << 22, "cuda": 1 << 24}  # logits that the head makes at a time: 16 MiB in float32 stay in a processor's cache
_COPIES_OF_LOGITS = 3  # the slice, its gradient, and what the two are made with
_MOMENTS = {"adamw_torch_fused": 2, "adamw_torch": 2, "adafactor": 0, "sgd": 0}


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank's device by what holds them; `activations`, `logits` and `gathered` only while a row is trained."""

    weights: float
    compute_copy: float  # weights in the precision of forward and backward
    gradients: float
    optimizer: float
    activations: float
    logits: float  # slices of the head, and the gradient of its weight
    gathered: float  # FSDP2: whole layers, embeddings and head, and their gradients before they are reduced
    sync: float  # bucket of a weight sync and the largest tensor in it
    is_accumulating: bool = False  # more than one microbatch per update
    host: float = 0.0  # main memory, where the rank's GPU is given neither weights nor gradients nor optimizer state

    @property
    def state(self) -> float:
        """What is there also between steps."""
        return self.weights + self.optimizer

    @property
    def peak(self) -> float:
        training = self.compute_copy + self.activations + self.logits + self.gathered
        training += self.gradients if self.is_accumulating else 0.0
        return self.state + max(training, self.gradients, self.sync)


def estimate(
    section: Any,  # the `model` section
    text: Mapping[str, Any] | None,  # config.json of the text model, None where only the size is known
    *,
    num_parameters: int,
    num_frozen: int = 0,  # of them, those of towers that text does not pass
    num_ranks: int,
    row_tokens: int | None,
    optimizer: str = "adamw_torch_fused",
    bucket_mb: float = 0.0,
    device: str = "cuda",
    num_microbatches: int = 1,
) -> Memory:
    """Memory of one of `num_ranks` ranks that trains rows of `row_tokens` tokens."""
    options = section.fsdp.options if num_ranks > 1 or section.fsdp.enabled else {}
    is_sharded = num_ranks > 1 or bool(section.fsdp.enabled)
    num_shards = max(1, num_ranks // int(options.get("replicate", 1)))  # a copy of the model is shared by so many ranks
    is_mixed = section.precision != "no"
    shape = _Shape(text) if text is not None else None
    trained = num_parameters - num_frozen
    if section.lora.enabled:
        trained = shape.adapter_parameters(section.lora.r) if shape else 0
    width, loaded = 2 if is_mixed else BYTES[section.dtype], BYTES[section.dtype]
    master = 4 if is_sharded and is_mixed else loaded
    num_loaded = num_parameters - (0 if section.lora.enabled else trained)
    weights = (loaded * num_loaded + master * trained) / num_shards
    gradients = master * trained / num_shards
    optimizer_state = _MOMENTS.get(optimizer, 2) * gradients
    is_offloaded = bool(options.get("cpu_offload")) and device != "cpu"
    activations = logits = 0.0
    if shape is not None and row_tokens:
        activations = shape.activations(row_tokens, width, is_mixed, section.gradient_checkpointing)
        logits = _COPIES_OF_LOGITS * 4.0 * min(SLICE_LOGITS[device], row_tokens * shape.vocab)
        logits += 0 if section.lora.enabled else float(width * shape.vocab * shape.hidden)
    needs_copy = is_mixed and not is_sharded and loaded == 4
    return Memory(
        weights=0.0 if is_offloaded else weights,
        compute_copy=2.0 * (num_parameters - num_frozen) if needs_copy else 0.0,
        gradients=0.0 if is_offloaded else gradients,
        optimizer=0.0 if is_offloaded else optimizer_state,
        activations=activations,
        logits=logits,
        gathered=_gathered(section, options, shape, num_parameters, num_frozen, width) if is_sharded and shape else 0.0,
        sync=min(bucket_mb * 2**20, 4.0 * num_parameters)
        + (4.0 * shape.vocab * shape.hidden if shape is not None and is_sharded else 0.0),
        is_accumulating=num_microbatches > 1,
        host=weights + gradients + optimizer_state if is_offloaded else 0.0,
    )


def _gathered(
    section: Any, options: Mapping[str, Any], shape: _Shape, num_parameters: int, num_frozen: int, width: int
) -> float:
    """What FSDP2 holds whole: all that is in no layer, the layers at work and those fetched ahead, gradients of one unit.

    `width`: bytes per weight in forward. Gradients are there in `width` and, while they are reduced, in float32.
    """
    layer = (num_parameters - num_frozen - shape.embeddings) / shape.layers
    num_whole = min(shape.layers, 1 + int(options.get("prefetch", 1)))
    if options.get("reshard_after_forward") is False:
        num_whole = shape.layers
    whole = width * (shape.embeddings + num_frozen + num_whole * layer)
    return whole + (0 if section.lora.enabled else (width + 4) * max(shape.embeddings, layer))


class _Shape:
    """The sizes of a text model's config.json that activations depend on."""

    def __init__(self, text: Mapping[str, Any]):
        self.hidden, self.layers = int(text["hidden_size"]), int(text["num_hidden_layers"])
        self.vocab, heads = int(text["vocab_size"]), int(text["num_attention_heads"])
        head_dim = int(text.get("head_dim") or self.hidden // heads)
        self.width = heads * head_dim
        self.kv_width = int(text.get("num_key_value_heads") or heads) * head_dim
        self.met = self.dense = int(text.get("intermediate_size") or 4 * self.hidden)
        if num_experts(text):
            width = int(text.get("moe_intermediate_size") or self.met)
            self.dense = int(text.get("shared_expert_intermediate_size") or 0)
            self.dense += width * int(text.get("n_shared_experts") or text.get("moe_num_shared_experts") or 0)
            self.met = width * int(text.get("num_experts_per_tok") or text.get("moe_k") or 1) + self.dense
        self.embeddings = self.vocab * self.hidden * (1 if text.get("tie_word_embeddings") else 2)

    def activations(self, tokens: int, width: int, is_mixed: bool, is_checkpointed: bool) -> float:
        layer = (14 if is_mixed else 6) * self.hidden + 4 * (self.width + self.kv_width + self.met)
        values = self.layers * self.hidden + layer if is_checkpointed else self.layers * layer
        return float(tokens * width * values)

    def adapter_parameters(self, rank: int) -> int:
        """Of an adapter of this rank on every linear layer outside experts."""
        attention = 2 * (self.hidden + self.width) + 2 * (self.hidden + self.kv_width)
        return self.layers * rank * (attention + (3 * (self.hidden + self.dense) if self.dense else 0))
