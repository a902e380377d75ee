"""The number of parameters from a model's small files, against models made from the real configuration classes."""

import json
import math

import pytest
import torch
import transformers as hf
from safetensors.torch import save_file

from agrpo.config.model_defaults import text_config
from agrpo.config.model_shape import num_parameters, shape_of

SIZES = dict(vocab_size=521, hidden_size=192, intermediate_size=307, num_hidden_layers=5, num_attention_heads=6,
             num_key_value_heads=2, head_dim=32, pad_token_id=0)  # fmt: skip
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=61)
LATENT = dict(q_lora_rank=48, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=24, num_key_value_heads=6)
DELTA = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=32)
FAMILIES = {
    "Llama": {},
    "Mistral": {},
    "Qwen2": dict(tie_word_embeddings=True),
    "Qwen3": {},
    "Gemma2": {},  # head tied by default, as in the next
    "Gemma3Text": {},
    "Phi3": {},
    "Starcoder2": {},  # an MLP of two matrices
    "Mixtral": dict(num_local_experts=7),  # experts as wide as intermediate_size
    "Qwen2Moe": dict(EXPERTS, num_experts=7, shared_expert_intermediate_size=53, decoder_sparse_step=2, mlp_only_layers=[1]),
    "Qwen3Moe": dict(EXPERTS, num_experts=7),
    "Olmoe": dict(num_experts=7),
    "Glm4Moe": dict(EXPERTS, n_routed_experts=8, n_group=1, topk_group=1, first_k_dense_replace=2, n_shared_experts=2),
    "Ernie4_5_Moe": dict(moe_num_experts=7, moe_k=2, moe_intermediate_size=61, moe_num_shared_experts=2),
    "DeepseekV3": dict(EXPERTS, **LATENT, n_routed_experts=8, n_group=1, topk_group=1, first_k_dense_replace=1),
    "Qwen3Next": dict(EXPERTS, **DELTA, num_experts=7, shared_expert_intermediate_size=53),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_by_formula_are_those_of_the_class(family, tmp_path):
    """Without biases and the norms inside layers, hence within 2 %; the file holds what was given and nothing else."""
    given = {**SIZES, **FAMILIES[family]}
    config = getattr(hf, f"{family}Config")(**given)
    with torch.device("meta"):
        model = getattr(hf, f"{family.removesuffix('Text')}ForCausalLM")(config)
    # Sparse, as many files on the Hub are: the rest are the class's defaults.
    (tmp_path / "config.json").write_text(json.dumps({"model_type": config.model_type, **given}))
    shape = shape_of(str(tmp_path))
    assert shape.num_parameters == pytest.approx(model.num_parameters(), rel=0.02)
    assert shape.source == "config.json"
    assert text_config(config.to_dict())["tie_word_embeddings"] == config.tie_word_embeddings


def test_known_checkpoints_by_their_published_sizes():
    """Mixtral-8x7B: 46.7 billion parameters; Gemma-2-2B: 2.61 billion; its file does not say that the head is tied."""
    mixtral = dict(model_type="mixtral", vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
                   num_attention_heads=32, num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2)  # fmt: skip
    gemma = dict(model_type="gemma2", vocab_size=256000, hidden_size=2304, intermediate_size=9216, num_hidden_layers=26,
                 num_attention_heads=8, num_key_value_heads=4, head_dim=256)  # fmt: skip
    assert num_parameters(text_config(mixtral)) == pytest.approx(46.70e9, rel=0.002)
    assert num_parameters(text_config(gemma)) == pytest.approx(2.614e9, rel=0.002)


def test_a_vision_language_file_that_leaves_almost_all_to_its_class(tmp_path):
    """As google/gemma-3-4b-it: heads, vocabulary and tied head are the class's; its text model has 3.88 billion parameters."""
    sparse = {"model_type": "gemma3", "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}}
    (tmp_path / "config.json").write_text(json.dumps(sparse))
    shape = shape_of(str(tmp_path))
    assert shape.num_parameters == pytest.approx(3.88e9, rel=0.002)
    assert (shape.text["num_attention_heads"], shape.vocab_size) == (8, 262208)


@pytest.mark.parametrize("of_whole, of_text, expected", [(True, False, True), (False, True, False), (None, True, True), (None, None, False)])
def test_the_head_is_tied_as_the_whole_model_says(of_whole, of_text, expected):
    whole = {} if of_whole is None else {"tie_word_embeddings": of_whole}
    text = {} if of_text is None else {"tie_word_embeddings": of_text}
    said = text_config({"model_type": "qwen3_vl", **whole, "text_config": {"model_type": "qwen3_vl_text", **text}})
    assert said["tie_word_embeddings"] is expected


def test_weights_that_are_there_are_counted(tmp_path):
    """A tied head that was written is no parameter of its own; towers for images are told apart; what cannot be read is not used."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": SIZES}))
    tensors = {"model.language_model.embed_tokens.weight": (11, 7), "lm_head.weight": (11, 7), "model.vision_tower.x": (3, 5)}
    save_file({n: torch.zeros(s, dtype=torch.bfloat16) for n, s in tensors.items()}, tmp_path / "model.safetensors")
    shape = shape_of(str(tmp_path))
    assert (shape.num_parameters, shape.num_frozen, shape.source) == (77 + 15, 15, "its weights")
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    assert shape_of(str(tmp_path)).source == "config.json"
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    shards = {}
    for number, (name, size) in enumerate(tensors.items()):
        save_file({name: torch.zeros(size)}, tmp_path / f"{number}.safetensors")
        shards[name] = f"{number}.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert shape_of(str(tmp_path)).num_parameters == sum(map(math.prod, tensors.values())) - 77


def test_a_model_whose_file_and_name_tell_nothing_is_unknown(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nobodys", "hidden_size": 8}))
    assert shape_of(str(tmp_path)) is None
    named = tmp_path / "nobodys-3B"
    named.mkdir()
    (named / "config.json").write_text(json.dumps({"model_type": "../nobodys", "hidden_size": 8}))
    shape = shape_of(str(named))
    assert (shape.num_parameters, shape.text) == (3_000_000_000, None)
    assert shape.source.endswith("config.json tells no num_hidden_layers, num_attention_heads, vocab_size")
