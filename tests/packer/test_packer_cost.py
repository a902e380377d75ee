"""The cost of a row follows from the model's shape; settings that cannot work are refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from agrpo.packer.cost import Cost
from agrpo.packer.sequence import Sequence
from agrpo.packer.tree import Tree
from agrpo.schema import violations


def config_of(**changes):
    """Qwen3-1.7B with these changes."""
    fields = {
        "hidden_size": 2048,
        "num_hidden_layers": 28,
        "intermediate_size": 6144,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "sliding_window": None,
    }
    return SimpleNamespace(**{**fields, **changes})


def test_a_model_counted_by_hand():
    # Matrices of one layer: q 3x4, k 3x2, v 3x2, o 4x3, gate 3x5, up 3x5, down 5x3 = 81; head 3x7 = 21.
    # Twice that in operations: 2 * (2 * 81 + 21) = 366 per token. Context: 2 layers * 2 heads * (2 + 2) * 2 = 32.
    cost = Cost.of_config(
        config_of(hidden_size=3, num_hidden_layers=2, intermediate_size=5, num_attention_heads=2, num_key_value_heads=1,
                  head_dim=2, vocab_size=7)
    )  # fmt: skip
    assert cost == Cost(linear=366 / 32, attention=1.0)
    assert cost.of(5, 15) == 5 * 366 / 32 + 15


def test_qwen3_1_7b_is_linear_up_to_about_15k_tokens():
    # 1.72e9 parameters meet each token (tied head included): 3.44e9 operations; context 28 * 4 * 2048 = 2.3e5.
    assert Cost.of_config(config_of()).linear == pytest.approx(2 * 1.72e9 / (28 * 4 * 2048), rel=2e-3)


def test_layers_without_full_attention():
    full = Cost.of_config(config_of())
    kinds = ["sliding_attention"] * 21 + ["full_attention"] * 7
    windowed = Cost.of_config(config_of(layer_types=kinds, sliding_window=512))
    assert windowed.linear == pytest.approx(4 * full.linear + 3 * 512)
    assert Cost.of_config(config_of(sliding_window=512)) == Cost(linear=1.0, attention=0.0)
    assert Cost.of_config(config_of(sliding_window=512, use_sliding_window=False)) == full
    for unknown in ({"kv_lora_rank": 512}, {"intermediate_size": None}, {"hidden_size": None}):
        assert Cost.of_config(config_of(**unknown)) == Cost(linear=1.0, attention=0.0)


def test_what_a_configuration_leaves_out():
    assert Cost.of_config(SimpleNamespace(text_config=config_of())) == Cost.of_config(config_of())
    assert Cost.of_config(vars(config_of())) == Cost.of_config(config_of())
    assert Cost.of_config(config_of(head_dim=None, num_key_value_heads=None)) == Cost.of_config(
        config_of(num_key_value_heads=16)
    )


@pytest.mark.parametrize("packer", [Tree, Sequence])
def test_settings_out_of_range(packer):
    assert violations(packer(), "packer") == []
    assert violations(packer(token_budget=0), "packer") == ["packer.token_budget must be >= 1, got 0"]
    assert violations(packer(linear_cost=-0.5), "packer") == ["packer.linear_cost must be >= 0, got -0.5"]


@pytest.mark.parametrize("packer", [Tree, Sequence])
def test_a_budget_below_the_longest_answer_is_refused(packer):  # COMPAT-29
    config = SimpleNamespace(sampler=SimpleNamespace(max_completion_length=512))
    assert packer().problems(config) == packer(token_budget=512).problems(config) == []
    (line,) = packer(token_budget=511).problems(config)
    assert line.startswith("packer.token_budget must be at least sampler.max_completion_length (512), got 511")
