"""Vision-language checkpoints on text: loaded by their own class, equal to it, and only their text model changes."""

import pytest
import torch
import transformers as hf
from model_build import VOCABULARY, group, make_row, sequence_packed
from model_rank import NoTokenizer
from safetensors import safe_open
from test_model_packed import _alone, _assert_same, _gradients, _terms, check_candidates

from agrpo.loss.score_centering import ScoreCentering
from agrpo.model import checkpoint, load
from agrpo.model.optim import Updater
from agrpo.model.weights import checkpoint_names, full_tensors
from agrpo.sections import Model, Optimizer

_TEXT = dict(
    vocab_size=VOCABULARY, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, pad_token_id=0, bos_token_id=1, eos_token_id=2, initializer_range=0.2,
)  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_VISION = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, patch_size=4, spatial_merge_size=2,
               temporal_patch_size=2, out_hidden_size=24)  # fmt: skip
_IMAGE = dict(image_token_id=59, video_token_id=58, vision_start_token_id=57, vision_end_token_id=56)
CONFIGS = {
    "qwen2_5_vl": lambda: hf.Qwen2_5_VLConfig(
        text_config={**_TEXT, "hidden_size": 32, "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}},
        vision_config={**_VISION, "out_hidden_size": 32, "fullatt_block_indexes": [0]}, **_IMAGE,
    ),
    "qwen3_vl": lambda: hf.Qwen3VLConfig(
        text_config={**_TEXT, "rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]}},
        vision_config={**_VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}, **_IMAGE,
    ),
    "qwen3_5": lambda: hf.Qwen3_5Config(
        text_config={**_TEXT, "linear_key_head_dim": 5, "linear_value_head_dim": 7, "linear_num_key_heads": 2,
                     "linear_num_value_heads": 4, "layer_types": ["linear_attention", "full_attention"],
                     "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}},
        vision_config={**_VISION, "num_position_embeddings": 16}, **_IMAGE,
    ),
    "qwen3_5_moe": lambda: hf.Qwen3_5MoeConfig(
        text_config={**_TEXT, "linear_key_head_dim": 5, "linear_value_head_dim": 7, "linear_num_key_heads": 2,
                     "linear_num_value_heads": 4, "layer_types": ["linear_attention", "full_attention"],
                     "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                     "shared_expert_intermediate_size": 16,
                     "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}},
        vision_config={**_VISION, "num_position_embeddings": 16}, **_IMAGE,
    ),
    "gemma3": lambda: hf.Gemma3Config(
        text_config={**_TEXT, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
        vision_config=dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=28,
                           patch_size=14), mm_tokens_per_image=4, image_token_index=59, boi_token_index=58,
        eoi_token_index=57,
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=CONFIGS)
def stored(request, tmp_path_factory):
    """A checkpoint written by the family's own class."""
    folder = tmp_path_factory.mktemp(request.param) / "stored"
    torch.manual_seed(7)
    hf.AutoModelForImageTextToText.from_config(CONFIGS[request.param]()).save_pretrained(folder)
    return folder


def _tensors(folder) -> dict[str, torch.Tensor]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _is_text(name: str) -> bool:
    return not any(part in name for part in ("visual", "vision", "projector"))


def test_gradients_and_sequence_packing_equal_each_sample_alone(stored):
    model = load.load_model(Model(path=str(stored), precision="no"), "cpu")
    plain = hf.AutoModelForImageTextToText.from_pretrained(stored, attn_implementation="eager")
    samples = [*group(1, [7, 11, 13]), *group(2, [5, 3], prompt=9, group_id=1)]
    alone = torch.cat([_alone(plain, s)[0] for s in samples])
    weights = torch.linspace(-1, 1, len(alone))
    expected = _gradients(plain, (weights * alone).sum())
    for row in (make_row(samples), sequence_packed(samples)):
        terms = _terms(model, row)
        torch.testing.assert_close(terms.trainer_logprobs, alone, atol=1e-5, rtol=0)
        got = _gradients(model, (weights * terms.trainer_logprobs).sum())
        _assert_same(got, {name: expected[name] for name in got}, 1e-4)
        assert {name for name in expected if _is_text(name)} <= got.keys()
    check_candidates(model, plain)


def test_one_step_changes_the_text_model_alone(stored, tmp_path):
    model, before = load.load_model(Model(path=str(stored), precision="no"), "cpu"), _tensors(stored)
    assert type(model).__name__.endswith("ForConditionalGeneration")
    assert any(not _is_text(name) for name in before)
    samples = [*group(1, [7, 11, 13]), *group(2, [5, 3], prompt=9, group_id=1)]
    row = make_row(samples)

    plain = hf.AutoModelForImageTextToText.from_pretrained(stored, attn_implementation="eager").train()
    terms = _terms(model, row)
    expected = torch.cat([_alone(plain, s)[0] for s in samples])
    torch.testing.assert_close(terms.trainer_logprobs, expected, atol=1e-5, rtol=0)

    updater = Updater(model, Optimizer(learning_rate=1e-2), None)
    updater.backward(ScoreCentering()(terms).mean())
    updater.step()
    assert len(updater.optimizer.state) == sum(p.requires_grad for p in model.parameters())
    assert set(checkpoint_names(model)) == {name for name in before if _is_text(name)}
    assert [n for n, _ in full_tensors(model)] == checkpoint_names(model)

    checkpoint.export(model, NoTokenizer(), tmp_path / "out", torch.float32)
    after = _tensors(tmp_path / "out")
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor) is not _is_text(name), name
    loaded = hf.AutoModelForImageTextToText.from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert type(loaded) is type(plain)
    got = torch.cat([_alone(loaded, s)[0] for s in samples])
    torch.testing.assert_close(got, _terms(model, row).trainer_logprobs, atol=1e-5, rtol=0)
