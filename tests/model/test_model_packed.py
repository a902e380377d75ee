"""A packed row gives each sample's log-probs and gradients exactly as transformers gives them for the sample alone."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_build import FAMILIES, VOCABULARY, group, make_model, make_row, make_sample, sequence_packed

from agrpo.loss.grpo import Grpo
from agrpo.loss.score_centering import ScoreCentering
from agrpo.model import attention
from agrpo.model.load import prepare
from agrpo.model.terms import DeviceRow, TokenTerms, token_logprobs, token_terms
from agrpo.sections import Model

TEMPERATURE = 0.7


def _terms(model, row) -> TokenTerms:
    return token_terms(model, DeviceRow.of(row, "cpu"), TEMPERATURE, want_head=True)


def _alone(model, sample):
    """[n] log-probs of the trained tokens and [n, V] of the vocabulary, by the model's own forward."""
    ids = torch.from_numpy(sample.token_ids).long()
    logprobs = torch.log_softmax(model(input_ids=ids[None]).logits[0] / TEMPERATURE, -1)
    trained = torch.from_numpy(np.flatnonzero(sample.loss_mask))
    rows = logprobs[trained - 1]
    return rows.gather(1, ids[trained, None]).squeeze(1), rows


def _gradients(model, loss) -> torch.Tensor:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _assert_same(got: dict, expected: dict, tolerance: float) -> None:
    assert got.keys() == expected.keys()
    whole = torch.cat([g.flatten() for g in expected.values()]).norm()
    for name, reference in expected.items():
        # Key biases and the like have gradients of rounding size: the whole gradient is the floor of the scale.
        scale = max(float(reference.norm()), 1e-3 * float(whole))
        assert float((got[name] - reference).norm()) <= tolerance * scale, name


def _check(family: str, samples, backend: str = "auto") -> None:
    packed, plain = make_model(family, attention.implementation(backend)), make_model(family, "eager")
    terms, alone = _terms(packed, make_row(samples)), [_alone(plain, s) for s in samples]
    expected = torch.cat([a[0] for a in alone])
    torch.testing.assert_close(terms.trainer_logprobs, expected, atol=1e-5, rtol=0)
    heads = torch.cat(
        [a[1].gather(1, torch.from_numpy(s.head_ids).long()) for a, s in zip(alone, samples, strict=True)]
    )
    torch.testing.assert_close(terms.head_trainer_logprobs, heads, atol=1e-5, rtol=0)
    full = torch.cat([a[1] for a in alone])
    torch.testing.assert_close(terms.entropy, -(full.exp() * full).sum(-1), atol=1e-5, rtol=0)
    weight = torch.linspace(-1, 1, len(expected))
    head_weight = torch.linspace(-0.5, 1, heads.numel()).view_as(heads)
    got = _gradients(
        packed, (weight * terms.trainer_logprobs).sum() + (head_weight * terms.head_trainer_logprobs).sum()
    )
    _assert_same(got, _gradients(plain, (weight * expected).sum() + (head_weight * heads).sum()), 1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_alone(family):
    _check(family, [*group(1, [7, 11, 13, 11]), *group(2, [5, 3], prompt=9, group_id=1)])


@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral", "gemma3"])
def test_keys_gathered_along_each_path_give_the_same(family):
    _check(family, [*group(1, [7, 11, 13, 11]), *group(2, [5, 3], prompt=9, group_id=1)], backend="sdpa")


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    family=st.sampled_from(["qwen3", "llama", "mistral", "gemma2"]),
    seeds=st.lists(
        st.tuples(st.integers(0, 99), st.lists(st.integers(1, 17), min_size=1, max_size=5)), min_size=1, max_size=3
    ),
)
def test_random_trees_equal_alone(family, seeds):
    samples = [s for i, (seed, answers) in enumerate(seeds) for s in group(seed, answers, 1 + seed % 7, group_id=i)]
    _check(family, samples)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
@pytest.mark.parametrize("loss", [ScoreCentering(), Grpo()])
def test_tree_and_sequence_packing_give_the_same_loss_and_gradients(loss, family):
    samples, model = [*group(3, [7, 11, 13]), *group(4, [5, 5], group_id=1)], make_model(family)
    results = []
    for row in (make_row(samples), sequence_packed(samples)):
        value = loss(_terms(model, row)).sum() / row.num_trained_tokens
        results.append((value.detach(), _gradients(model, value)))
    torch.testing.assert_close(results[0][0], results[1][0], atol=1e-5, rtol=1e-5)
    _assert_same(results[0][1], results[1][1], 1e-4)
    assert make_row(samples).num_tokens < sequence_packed(samples).num_tokens


def test_identical_samples_have_all_their_terms():
    sample = make_sample([5, 6, 7, 8, 9], 3)
    row = make_row([sample, sample])
    assert row.num_tokens == 5
    assert _terms(make_model("qwen3"), row).trainer_logprobs.shape == (6,)


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma2", "qwen3_5", "qwen3_moe"])
def test_candidate_sets_renormalise_each_term_and_leave_the_entropy_whole(family):
    check_candidates(make_model(family), make_model(family, "eager"))


def check_candidates(packed, plain) -> None:
    """Forward and backward of a tree with candidate sets against the reference's whole vocabulary, sample by sample."""
    samples = group(5, [7, 11], keep=9)
    row = make_row(samples)
    terms, rows = _terms(packed, row), torch.cat([_alone(plain, s)[1] for s in samples])
    expected, heads = [], []
    for i, target in enumerate(row.target_ids.tolist()):
        kept = torch.from_numpy(row.candidates[i]).long()
        mass = rows[i, kept].logsumexp(0)
        expected.append(rows[i, target] - mass)
        heads.append([(rows[i, v] - mass).item() if v in kept else -torch.inf for v in row.head_ids[i].tolist()])
    expected = torch.stack(expected)
    torch.testing.assert_close(terms.trainer_logprobs, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(terms.head_trainer_logprobs.detach(), torch.tensor(heads), atol=1e-5, rtol=0)
    torch.testing.assert_close(terms.entropy, -(rows.exp() * rows).sum(-1), atol=1e-5, rtol=0)
    assert terms.candidate_counts.tolist() == [len(row.candidates[i]) for i in range(len(expected))]
    got, reference = (_gradients(*pair) for pair in ((packed, terms.trainer_logprobs.sum()), (plain, expected.sum())))
    _assert_same(got, {name: reference[name] for name in got}, 1e-4)
    assert all(not reference[name].any() for name in reference.keys() - got.keys())


def test_a_row_without_terms_joins_the_graph_with_zero():
    model = make_model("qwen3")
    sample = make_sample([5, 6, 7, 8], 0)
    value = ScoreCentering()(_terms(model, make_row([sample]))).sum()
    grads = _gradients(model, value)
    assert value == 0
    assert len(grads) == len(list(model.parameters()))
    assert all(not g.any() for g in grads.values())


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "qwen3_moe"])
def test_gradient_checkpointing_changes_nothing(family):
    samples, grads, values = group(6, [7, 11, 5]), [], []
    for is_checkpointed in (False, True):
        model = make_model(family)
        if is_checkpointed:
            model = prepare(model, Model(path="-"))
        value = ScoreCentering()(_terms(model, make_row(samples))).mean()
        values.append(value.detach())
        grads.append(_gradients(model, value))
    torch.testing.assert_close(values[0], values[1], rtol=1e-5, atol=0)
    _assert_same(grads[1], grads[0], 1e-5)


def test_log_probs_of_a_plain_sequence():
    model, plain = make_model("llama"), make_model("llama", "eager")
    tokens = np.random.default_rng(0).integers(3, VOCABULARY, 17)
    expected, _ = _alone(plain, make_sample(tokens, 16))
    np.testing.assert_allclose(token_logprobs(model, tokens, TEMPERATURE, "cpu"), expected.detach().numpy(), atol=1e-5)
