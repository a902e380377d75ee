"""Tiny models of several families, samples, rows, and the dense account of tree attention they are compared with."""

from __future__ import annotations

import numpy as np
import torch
import transformers as hf

from agrpo.model import attention, delta
from agrpo.packer.cost import Cost
from agrpo.packer.sequence import Sequence
from agrpo.packer.tree import Tree
from agrpo.types import Ragged, Row, Sample

VOCABULARY = 61
_SHAPE = dict(
    vocab_size=VOCABULARY, hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=6, pad_token_id=0, bos_token_id=1, eos_token_id=2, initializer_range=0.2,
)  # fmt: skip
_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
# Half the width of the other families' weights: on hundreds of tokens the float32 rounding of transformers' own
# recurrence would otherwise exceed the tolerance.
_DELTA = {"initializer_range": 0.1, "head_dim": 8, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 5, "linear_value_head_dim": 7,
          "linear_num_key_heads": 2, "linear_num_value_heads": 4,
          "layer_types": ["linear_attention", "full_attention", "linear_attention"]}  # fmt: skip
_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "router_aux_loss_coef": 0.1}
FAMILIES = {
    "qwen3": (hf.Qwen3Config, {}),
    "llama": (hf.LlamaConfig, {"tie_word_embeddings": True}),
    "mistral": (hf.MistralConfig, {"sliding_window": 5}),
    "gemma2": (hf.Gemma2Config, {"sliding_window": 5, "query_pre_attn_scalar": 6, "attn_logit_softcapping": 3.0,
                                 "final_logit_softcapping": 2.0, "layer_types": _LAYERS}),
    "gemma3": (hf.Gemma3TextConfig, {"sliding_window": 3, "query_pre_attn_scalar": 6, "layer_types": _LAYERS}),
    "cohere": (hf.CohereConfig, {"logit_scale": 0.25}),
    "granite": (hf.GraniteConfig, {"logits_scaling": 3.0}),
    "qwen3_5": (hf.Qwen3_5TextConfig, {**_DELTA, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}}),
    "qwen3_next": (hf.Qwen3NextConfig, {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 16}),
    "qwen3_moe": (hf.Qwen3MoeConfig, _EXPERTS),
    "hyperclovax": (hf.HyperCLOVAXConfig, {"logits_scaling": 0.3}),
}  # fmt: skip


def make_model(
    family: str, implementation: str = attention.NAME, dtype: torch.dtype = torch.float32
) -> torch.nn.Module:
    """The same weights for every implementation; "eager" is transformers' own attention."""
    attention.register()
    kind, extra = FAMILIES[family]
    config = kind(**{**_SHAPE, **extra}, attn_implementation=implementation)
    torch.manual_seed(7)
    model = hf.AutoModelForCausalLM.from_config(config).to(dtype).train()
    if implementation == attention.NAME:
        delta.bind(model)
    return model


def make_sample(
    tokens, num_trained: int, *, group_id=0, rollout_index=0, advantage=1.0, num_head=3, seed=0, keep=None
) -> Sample:
    """The last `num_trained` tokens are trained; `keep` > 0 gives each a candidate set of about that many tokens."""
    rng = np.random.default_rng(seed)
    tokens = np.asarray(tokens, np.int32)
    mask = np.arange(len(tokens)) >= len(tokens) - num_trained
    targets = tokens[mask]
    heads = np.array([rng.permutation(VOCABULARY)[:num_head] for _ in targets], np.int32).reshape(
        len(targets), num_head
    )
    sets = None
    if keep:
        sets = Ragged.of([np.unique(np.append(rng.integers(0, VOCABULARY, keep), t)) for t in targets])
    return Sample(
        token_ids=tokens,
        loss_mask=mask,
        sampler_logprobs=np.where(mask, rng.uniform(-5, -3, len(tokens)), 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        advantage=advantage,
        head_ids=heads,
        head_logprobs=rng.uniform(-5, -3, heads.shape).astype(np.float32),
        candidates=sets,
        group_id=group_id,
        rollout_index=rollout_index,
    )


def make_row(samples: list[Sample], packer=None) -> Row:
    """All samples in one row."""
    planner = (packer or Tree()).planner(1, sum(len(s.token_ids) for s in samples), Cost(1.0), 1)
    for sample in samples:
        assert planner.add(sample) is None
    return planner.flush().microbatches[0].rows[0]


def sequence_packed(samples: list[Sample]) -> Row:
    return make_row(samples, Sequence())


def group(seed: int, answers: list[int], prompt: int = 5, *, keep=None, group_id=0) -> list[Sample]:
    """Siblings of one prompt with answers of these lengths; later ones fork from the first answer half way."""
    rng = np.random.default_rng(seed)
    start, first = rng.integers(3, VOCABULARY, prompt), rng.integers(3, VOCABULARY, max(answers))
    samples = []
    for index, length in enumerate(answers):
        shared = length // 2 if index % 2 else 0
        answer = np.concatenate([first[:shared], rng.integers(3, VOCABULARY, length - shared)])
        advantage = float(rng.normal())
        samples.append(make_sample(np.concatenate([start, answer]), length, group_id=group_id, rollout_index=index,
                                   advantage=advantage, seed=seed * 31 + index, keep=keep))  # fmt: skip
    return samples


def depth_first(draws: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(length, how many levels to climb) per segment to a depth-first layout."""
    starts, ends, parents, path, end = [], [], [], [], 0
    for length, climb in draws:
        path = path[: max(0, len(path) - climb)]
        starts.append(end)
        end += length
        ends.append(end)
        parents.append(path[-1] if path else -1)
        path.append(len(parents) - 1)
    return np.array(starts), np.array(ends), np.array(parents)


def dense_attention(query, key, value, starts, ends, parents, window=None, softcap=None):
    """[1, H, N, D] attention by one [N, N] ancestor mask, the definition that the fast back ends must meet."""
    tokens, depth = query.shape[2], torch.zeros(query.shape[2], dtype=torch.long)
    visible = torch.zeros(tokens, tokens, dtype=torch.bool)
    for s, (start, end) in enumerate(zip(starts, ends, strict=True)):
        path, node = [], s
        while node >= 0:
            path = list(range(starts[node], ends[node])) + path
            node = parents[node]
        for q in range(start, end):
            depth[q] = path.index(q)
            seen = path[: path.index(q) + 1]
            visible[q, seen if window is None else seen[-window:]] = True
    share = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(share, 1).transpose(-1, -2) * query.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return (weights @ value.repeat_interleave(share, 1)).transpose(1, 2), depth
