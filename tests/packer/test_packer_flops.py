"""Operations from a configuration against those that PyTorch counts while a real model of it runs."""

import numpy as np
import pytest
import torch
import transformers as hf
from packer_samples import make_sample
from torch.utils.flop_counter import FlopCounterMode

from agrpo.packer.cost import Cost
from agrpo.packer.flops import Flops, Training
from agrpo.packer.tree import Tree

SHAPE = dict(vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=4, num_attention_heads=4,
             num_key_value_heads=2, head_dim=6, pad_token_id=0, attn_implementation="eager")  # fmt: skip
MIXTURE = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=14)
CONFIGS = {
    "dense": lambda: hf.Qwen3Config(**SHAPE),
    "windows": lambda: hf.Gemma2Config(**SHAPE, sliding_window=5),
    "mixture": lambda: hf.Qwen3MoeConfig(**SHAPE, **MIXTURE, mlp_only_layers=[1], experts_implementation="eager"),
    "shared": lambda: hf.Qwen2MoeConfig(**SHAPE, **MIXTURE, shared_expert_intermediate_size=22, experts_implementation="eager"),
    "other names": lambda: hf.Ernie4_5_MoeConfig(
        **{k: v for k, v in SHAPE.items() if k != "head_dim"}, moe_num_experts=5, moe_k=2, moe_intermediate_size=14,
        moe_num_shared_experts=1, moe_layer_start_index=1, experts_implementation="eager",
    ),
    "hybrid": lambda: hf.Qwen3NextConfig(
        **SHAPE, **MIXTURE, shared_expert_intermediate_size=22, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=6, linear_value_head_dim=6, experts_implementation="eager",
    ),
}  # fmt: skip


def counted(model: torch.nn.Module, tokens: int) -> int:
    counter = FlopCounterMode(display=False)
    ids = torch.arange(tokens)[None] % 61
    with torch.no_grad(), counter:
        model(input_ids=ids, use_cache=False)
    return counter.get_total_flops()


@pytest.mark.parametrize("name", sorted(set(CONFIGS) - {"hybrid"}))
def test_operations_equal_those_of_the_model(name):
    """Eager attention computes every pair of positions."""
    config = CONFIGS[name]()
    torch.manual_seed(3)
    model, flops, tokens = hf.AutoModelForCausalLM.from_config(config).eval(), Flops.of_config(config), 7
    pairs = flops.per_context + sum(cost for _, cost in flops.windows)
    expected = (flops.per_token + flops.per_term) * tokens + pairs * tokens**2
    assert counted(model, tokens) == pytest.approx(expected, rel=1e-3)
    assert Flops.of_config(config.to_dict()) == flops  # config.json has the model's own names alone


def test_operations_of_a_hybrid_follow_from_its_weights():
    """Two for each weight that a token meets, 2 of 5 experts, and 6 * 4 heads * 6 * 6 for each of 3 recurrences.

    The reference kernel works on chunks of 64 padded tokens, so its operations say nothing of a token's.
    """
    config = CONFIGS["hybrid"]()
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(config)
    met = sum(
        p.numel() * (2 / 5 if ".experts." in name else 1)
        for name, p in model.model.layers.named_parameters()
        if p.ndim > 1
    )
    assert Flops.of_config(config).per_token == pytest.approx(2 * met + 3 * 6 * 4 * 6 * 6)


def test_a_rows_operations_by_hand():
    """[1 2 3 4] and [1 2 3 5], one token trained: packed 1 2 | 3 4 | 3 5, contexts 1 2 3 4 3 4, cut by a window of 3."""
    planner = Tree().planner(1, 8, Cost(1.0), 1)
    for last in (4, 5):
        planner.add(make_sample([1, 2, 3, last], 1, rollout_index=last))
    row = planner.flush().microbatches[0].rows[0]
    contexts = np.array([1, 2, 3, 4, 3, 4])
    flops = Flops(per_token=100.0, per_term=10.0, per_context=2.0, windows=((3, 1.0),))
    attention = 2 * contexts.sum() + np.minimum(contexts, 3).sum()
    products = 100 * 6 + 10 * 2
    assert flops.attention_of(row) == attention
    assert flops.products_of(row) == products
    assert Training(flops).of(row) == 3 * (attention + products)
    assert Training(flops, has_frozen_weights=True).of(row) == 3 * attention + 2 * products
    assert Training(flops).executed(row) == 3 * (attention + products) + 20
    assert Training(flops, is_recomputed=True).executed(row) == 4 * (attention + products)
