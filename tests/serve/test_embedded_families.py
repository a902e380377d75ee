"""Gated DeltaNet hybrids, mixtures of experts and vision-language models on the embedded server, before and after a sync."""

import pytest
import torch
import transformers as hf
from serving import EOS, assert_logprobs, call, generate, prompt_of, together

from agrpo.serve.embedded import EmbeddedServer

_SHAPE = dict(
    vocab_size=97, hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=701, initializer_range=0.1, eos_token_id=EOS,
    bos_token_id=None, pad_token_id=None,
)  # fmt: skip
_DELTA = dict(
    linear_key_head_dim=5, linear_value_head_dim=7, linear_num_key_heads=2, linear_num_value_heads=4,
    layer_types=["linear_attention", "full_attention", "linear_attention"],
)  # fmt: skip
_EXPERTS = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=16)
CONFIGS = {
    "qwen3_next": lambda: hf.Qwen3NextConfig(**_SHAPE, **_DELTA, **_EXPERTS, shared_expert_intermediate_size=16),
    "qwen3_5": lambda: hf.Qwen3_5TextConfig(
        **_SHAPE, **_DELTA, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
                                             "mrope_section": [1, 1, 0]}
    ),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(**_SHAPE, **_EXPERTS),
    "qwen3_vl": lambda: hf.Qwen3VLConfig(
        text_config={**_SHAPE, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
        vision_config=dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, patch_size=4, spatial_merge_size=2,
                           temporal_patch_size=2, out_hidden_size=24, deepstack_visual_indexes=[0],
                           num_position_embeddings=16),
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=CONFIGS)
def two(request, tmp_path_factory):
    """Folders of two models of one architecture."""
    folders = [tmp_path_factory.mktemp(request.param) / name for name in ("first", "second")]
    for seed, folder in enumerate(folders):
        torch.manual_seed(seed)
        kind = hf.AutoModelForImageTextToText if "vl" in request.param else hf.AutoModelForCausalLM
        kind.from_config(CONFIGS[request.param]()).save_pretrained(folder)
    return [str(folder) for folder in folders]


def test_logprobs_equal_a_plain_forward_before_and_after_new_weights(two, plain):
    first, second = two
    prompts = [prompt_of(i, n) for i, n in enumerate([3, 1, 71, 7])]
    prompts.append(prompts[2])  # siblings share their prompt's computation
    with EmbeddedServer(first) as server:
        for folder in (first, second):
            choices = together(
                [
                    lambda i=i, p=p: generate(server.url, p, max_tokens=13 + i, logprobs=5, seed=i, ignore_eos=True)
                    for i, p in enumerate(prompts)
                ]
            )
            for prompt, choice in zip(prompts, choices, strict=True):
                assert_logprobs(choice, plain(folder, prompt + choice["token_ids"]), len(prompt))
            assert choices[2]["token_ids"] != choices[4]["token_ids"]
            assert call(server.url, "/pause?mode=keep&clear_cache=true", method="POST")[0] == 200
            body = {"method": "reload_weights", "kwargs": {"weights_path": second}}
            status, answer = call(server.url, "/collective_rpc", body)
            assert status == 200, answer
            assert call(server.url, "/resume", method="POST")[0] == 200
