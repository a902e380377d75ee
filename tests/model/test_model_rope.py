"""Frequencies that depend on the length are those of the served context for every sample, however rows are packed."""

import numpy as np
import pytest
import torch
import transformers as hf
from model_build import VOCABULARY, make_row, make_sample, sequence_packed

from agrpo.errors import ConfigError
from agrpo.model import attention
from agrpo.model.load import prepare
from agrpo.model.rope import fix_rope
from agrpo.model.terms import DeviceRow, token_terms
from agrpo.sections import Model
from agrpo.serve.runner import max_length

ORIGINAL, LONGEST = 31, 127
SHORT, LONG = [1.0, 1.5], [4.0, 9.0]
_LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": ORIGINAL}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
_SHAPE = dict(
    vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=4, pad_token_id=0, bos_token_id=1, eos_token_id=2, initializer_range=0.3,
)  # fmt: skip


def _longrope(short, long, **more):
    return {**_LONGROPE, "short_factor": short, "long_factor": long, **more}


def _build(kind, rope, implementation, longest=LONGEST, **extra):
    torch.manual_seed(3)
    config = kind(**_SHAPE, rope_parameters=rope, max_position_embeddings=longest, **extra)
    return hf.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)


def _check(trained, reference, context):
    """Rows of a short and a long sample, and of the short one, against transformers' forward of each alone, under fixed frequencies."""
    model = prepare(trained, Model(path="-", precision="no"))
    fix_rope(model, context)
    tokens = np.random.default_rng(5).integers(3, VOCABULARY, (2, context))
    samples = [make_sample(tokens[0, :19], 11), make_sample(tokens[1], 13, rollout_index=1)]
    for row in (make_row(samples), sequence_packed(samples), make_row(samples[:1])):
        terms = token_terms(model, DeviceRow.of(row, "cpu"), 1.0, want_head=False)
        for index, rollout_index in enumerate(row.rollout_indices):
            sample = samples[rollout_index]
            ids = torch.from_numpy(sample.token_ids).long()
            with torch.no_grad():
                logprobs = reference(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            got = terms.trainer_logprobs[torch.from_numpy(row.sample_index == index)]
            torch.testing.assert_close(got, logprobs[-len(got) :], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("context", "factors"), [(ORIGINAL, SHORT), (ORIGINAL + 66, LONG)])
def test_longrope_has_the_factors_of_the_served_context(context, factors):
    attention.register()
    trained = _build(hf.Phi3Config, _longrope(SHORT, LONG), attention.NAME, original_max_position_embeddings=ORIGINAL)
    # The reference has no other factors to choose.
    reference = _build(hf.Phi3Config, _longrope(factors, factors), "eager", original_max_position_embeddings=ORIGINAL)
    _check(trained, reference, context)


def test_longrope_of_one_kind_of_layers():
    attention.register()
    layers = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=200)
    models = [
        _build(hf.Gemma3TextConfig, {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
               "full_attention": _longrope(short, LONG, factor=4.0)}, implementation, **layers)
        for short, implementation in ((SHORT, attention.NAME), (LONG, "eager"))
    ]  # fmt: skip
    _check(*models, ORIGINAL + 66)


def test_dynamic_scaling_stays_that_of_the_models_own_context():
    attention.register()
    trained = _build(hf.LlamaConfig, _DYNAMIC, attention.NAME, longest=ORIGINAL)
    _check(trained, _build(hf.LlamaConfig, {"rope_type": "default", "rope_theta": 1e4}, "eager"), ORIGINAL + 66)


def test_the_embedded_server_stays_within_the_original_context():
    model = _build(hf.Phi3Config, _longrope(SHORT, LONG), "eager", original_max_position_embeddings=ORIGINAL)
    assert max_length(model, None) == max_length(model, ORIGINAL) == ORIGINAL
    with pytest.raises(ConfigError, match=f"server.max_model_len must be at most {ORIGINAL}"):
        max_length(model, ORIGINAL + 1)


def test_frequencies_that_the_trainer_lacks_are_refused():
    rope = _longrope(SHORT, LONG, short_mscale=1.1, long_mscale=1.2)
    model = _build(hf.PhimoeConfig, rope, "eager", num_local_experts=3, original_max_position_embeddings=ORIGINAL)
    fix_rope(model, ORIGINAL)
    model = _build(hf.PhimoeConfig, rope, "eager", num_local_experts=3, original_max_position_embeddings=ORIGINAL)
    with pytest.raises(ConfigError, match=f"server.max_model_len must be at most {ORIGINAL}"):
        fix_rope(model, ORIGINAL + 1)
