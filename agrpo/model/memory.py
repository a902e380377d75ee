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

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "auto": 2, None: 4}
SLICE_LOGITS = {"cpu": 1 << 22, "cuda": 1 << 24}  # logits that the head makes at a time: 16 MiB in float32 stay in a processor's cache
_COPIES_OF_LOGITS = 3  # the slice, its gradient, and what the two are made with
_MOMENTS = {"adamw_torch_fused": 2, "adamw_torch": 2, "adafactor": 0, "sgd": 0}


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank by what holds them; `activations`, `logits` and `gathered` only while a row is trained."""

    weights: float
    compute_copy: float  # weights in the precision of forward and backward
    gradients: float
    optimizer: float
    activations: float
    logits: float  # slices of the head, and the gradient of its weight
    gathered: float  # FSDP2: whole layers, embeddings and head, and their gradients before they are reduced
    sync: float  # bucket of a weight sync and the largest tensor in it
    is_accumulating: bool = False  # more than one microbatch per update

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
    num_ranks: int,
    row_tokens: int | None,
    optimizer: str = "adamw_torch_fused",
    bucket_mb: float = 0.0,
    device: str = "cuda",
    num_microbatches: int = 1,
) -> Memory:
    """Memory of one of `num_ranks` ranks that trains rows of `row_tokens` tokens."""
    is_sharded = num_ranks > 1 or bool(section.fsdp.enabled)
    is_mixed = section.precision != "no"
    width = BYTES[section.dtype] if not is_mixed else 2
    shape = _Shape(text) if text is not None else None
    trained = shape.adapter_parameters(section.lora.r) if section.lora.enabled and shape else num_parameters
    if section.lora.enabled and shape is None:
        trained = 0
    stored = 4 if is_sharded and is_mixed and not section.lora.enabled else BYTES[section.dtype]
    trained_bytes = (4 if is_mixed and is_sharded else BYTES[section.dtype]) * trained / num_ranks
    activations = logits = gathered = 0.0
    if shape is not None and row_tokens:
        activations = shape.activations(row_tokens, width, is_mixed, section.gradient_checkpointing)
        logits = _COPIES_OF_LOGITS * 4.0 * min(SLICE_LOGITS[device], row_tokens * shape.vocab)
        logits += 0 if section.lora.enabled else float(width * shape.vocab * shape.hidden)
    if shape is not None and is_sharded:
        layer = (num_parameters - shape.embeddings) / shape.layers
        gathered = width * (shape.embeddings + 2 * layer)
        gathered += 0 if section.lora.enabled else (width + 4) * max(shape.embeddings, layer)
    return Memory(
        weights=stored * num_parameters / num_ranks,
        compute_copy=2.0 * num_parameters if is_mixed and not is_sharded and BYTES[section.dtype] == 4 else 0.0,
        gradients=trained_bytes,
        optimizer=_MOMENTS.get(optimizer, 2) * trained_bytes,
        activations=activations,
        logits=logits,
        gathered=gathered,
        sync=min(bucket_mb * 2**20, 4.0 * num_parameters)
        + (4.0 * shape.vocab * shape.hidden if shape is not None and is_sharded else 0.0),
        is_accumulating=num_microbatches > 1,
    )


class _Shape:
    """The sizes of a text model's config.json that activations depend on."""

    def __init__(self, text: Mapping[str, Any]):
        self.hidden, self.layers = int(text["hidden_size"]), int(text["num_hidden_layers"])
        self.vocab, heads = int(text["vocab_size"]), int(text["num_attention_heads"])
        head_dim = int(text.get("head_dim") or self.hidden // heads)
        self.width = heads * head_dim
        self.kv_width = int(text.get("num_key_value_heads") or heads) * head_dim
        self.met = self.intermediate = int(text.get("intermediate_size") or 4 * self.hidden)
        if text.get("num_experts_per_tok") and text.get("moe_intermediate_size"):
            width = int(text["moe_intermediate_size"])
            self.met = width * int(text["num_experts_per_tok"]) + int(text.get("shared_expert_intermediate_size") or 0)
        self.embeddings = self.vocab * self.hidden * (1 if text.get("tie_word_embeddings") else 2)

    def activations(self, tokens: int, width: int, is_mixed: bool, is_checkpointed: bool) -> float:
        layer = (14 if is_mixed else 6) * self.hidden + 4 * (self.width + self.kv_width + self.met)
        values = self.layers * self.hidden + layer if is_checkpointed else self.layers * layer
        return float(tokens * width * values)

    def adapter_parameters(self, rank: int) -> int:
        """Of an adapter of this rank on every linear layer."""
        attention = 2 * (self.hidden + self.width) + 2 * (self.hidden + self.kv_width)
        return self.layers * rank * (attention + 3 * (self.hidden + self.intermediate))
