"""The objectives against hand numbers, finite differences, and the expectations that define them."""

import dataclasses

import numpy as np
import pytest
import torch

from agrpo.loss.grpo import Grpo
from agrpo.loss.score_centering import ScoreCentering
from agrpo.model.terms import TokenTerms

LOG = torch.tensor


def make_terms(ratios, advantages, **fields) -> TokenTerms:
    """Terms with these ratios; the sampler gave every token probability 0.1."""
    ratios = torch.as_tensor(ratios, dtype=torch.float64)
    count, sampler = len(ratios), torch.full((len(ratios),), 0.1, dtype=torch.float64).log()
    empty = torch.zeros(count, 0, dtype=torch.float64)
    values = dict(
        trainer_logprobs=(sampler + ratios.log()).requires_grad_(),
        sampler_logprobs=sampler,
        advantages=torch.as_tensor(advantages, dtype=torch.float64),
        head_ids=empty.long(),
        head_trainer_logprobs=empty,
        head_sampler_logprobs=empty,
        entropy=torch.zeros(count),
        sample_index=torch.zeros(count, dtype=torch.long),
        num_samples=1,
        versions=torch.zeros(count, dtype=torch.long),
        candidate_counts=None,
    )
    return TokenTerms(**{**values, **fields})


def softmax_terms(logits, sampler_logprobs, sampled, head_ids, advantages=None) -> TokenTerms:
    """Terms of explicit distributions over a vocabulary: logits [M, V] with gradient, sampler log-probs [M, V]."""
    trainer = torch.log_softmax(logits, -1)
    count = len(sampled)
    return make_terms(
        torch.ones(count),
        torch.ones(count) if advantages is None else advantages,
        trainer_logprobs=trainer.gather(1, sampled[:, None]).squeeze(1),
        sampler_logprobs=sampler_logprobs.gather(1, sampled[:, None]).squeeze(1),
        head_ids=head_ids,
        head_trainer_logprobs=trainer.gather(1, head_ids),
        head_sampler_logprobs=sampler_logprobs.gather(1, head_ids),
    )


def expected_gradient(loss, logits, sampler_logprobs, head: int) -> torch.Tensor:
    """E over o of q of the gradient [V] at the logits, summed exactly over the whole vocabulary, for advantage 1."""
    vocabulary = logits.shape[-1]
    logits = logits.detach().clone().requires_grad_()
    heads = sampler_logprobs.argsort(descending=True)[:head]
    sampled = torch.arange(vocabulary)
    terms = softmax_terms(
        logits.expand(vocabulary, -1), sampler_logprobs.expand(vocabulary, -1), sampled, heads.expand(vocabulary, -1)
    )
    (loss(terms) * sampler_logprobs.exp()).sum().backward()
    return logits.grad


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"), [(1.5, 1, -1.2), (0.7, -1, 0.8), (4, -1, 4), (5.5, -1, 0), (0.4, 1, 0)]
)
def test_grpo_values(ratio, advantage, expected):
    """LOSS-5."""
    assert Grpo()(make_terms([ratio], [advantage])).item() == pytest.approx(expected, abs=1e-12)


def test_masked_tokens_stay_in_the_denominator():
    """LOSS-3: one of two masked gives half of the other's term."""
    assert Grpo()(make_terms([1.1, 7.0], [1, 1])).mean().item() == pytest.approx(-0.55)


def test_the_range_of_ratios_is_inclusive_and_epsilon_high_is_its_own():
    bounds = LOG([0.5, 2.0], dtype=torch.float64)
    terms = make_terms(bounds, [1.0, -1.0], trainer_logprobs=bounds.log(), sampler_logprobs=torch.zeros(2).double())
    assert Grpo(clip_max=2.0)(terms).tolist() == pytest.approx([-0.5, 2.0])
    assert Grpo(epsilon_high=0.28)(make_terms([2.0], [1.0])).item() == pytest.approx(-1.28)


def test_an_infinite_ratio_is_masked_without_nan():
    terms = make_terms([1.0, 1.0], [1, -1])
    terms = dataclasses.replace(terms, sampler_logprobs=LOG([-np.inf, -2.0], dtype=torch.float64))
    for loss in (Grpo(), ScoreCentering()):
        assert loss(terms)[0].item() == 0


def test_every_token_has_equal_weight():
    """LOSS-23: two rows of advantage 1 and three of advantage 3, equally long, at r = 1."""
    advantages = [1.0] * 14 + [3.0] * 21
    assert Grpo()(make_terms(torch.ones(35), advantages)).mean().item() == pytest.approx(-2.2)


def test_normalisation_by_step_and_by_microbatch():
    """LOSS-18: 100 tokens of 2.0 and 900 of 0.5."""
    microbatches = [Grpo()(make_terms(torch.ones(100), torch.full((100,), -2.0))),
                    Grpo()(make_terms(torch.ones(900), torch.full((900,), -0.5)))]  # fmt: skip
    assert (sum(m.sum() for m in microbatches) / 1000).item() == pytest.approx(0.65)
    assert (sum(m.mean() for m in microbatches) / 2).item() == pytest.approx(1.25)


def _random_case(seed: int, rows: int = 7, vocabulary: int = 11, head: int = 3):
    torch.manual_seed(seed)
    logits = torch.randn(rows, vocabulary, dtype=torch.float64)
    sampler = torch.log_softmax(logits + 0.7 * torch.randn_like(logits), -1)
    sampled = torch.multinomial(sampler.exp(), 1).squeeze(1)
    return logits, sampler, sampled, sampler.topk(head).indices, torch.randn(rows, dtype=torch.float64)


def _numeric_gradient(function, logits, step=1e-6):
    grad = torch.zeros_like(logits)
    for i in np.ndindex(*logits.shape):
        for sign in (1, -1):
            moved = logits.clone()
            moved[i] += sign * step
            grad[i] += sign * function(moved) / (2 * step)
    return grad


@pytest.mark.parametrize("seed", range(5))
def test_grpo_gradient_equals_finite_differences(seed):
    """LOSS-12: of -1[in range] min(r A, clip(r) A), written again in numpy-like scalars."""
    logits, sampler, sampled, heads, advantages = _random_case(seed)
    rows = torch.arange(len(sampled))

    def defining(moved):
        ratio = (torch.log_softmax(moved, -1)[rows, sampled] - sampler[rows, sampled]).exp()
        terms = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        return -(terms * ((ratio >= 0.5) & (ratio <= 5))).sum().item()

    leaf = logits.clone().requires_grad_()
    Grpo()(softmax_terms(leaf, sampler, sampled, heads, advantages)).sum().backward()
    torch.testing.assert_close(leaf.grad, _numeric_gradient(defining, logits), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("tail", ["proportional", "none"])
@pytest.mark.parametrize("seed", range(5))
def test_score_centering_gradient_equals_finite_differences(seed, tail):
    """LOSS-12: -A (f(r_o) grad log p(o) - sum_v c_v grad log p(v)), with c summed over the whole modelled sampler."""
    logits, sampler, sampled, heads, advantages = _random_case(seed)
    rows, trainer = torch.arange(len(sampled)), torch.log_softmax(logits, -1).exp()

    def band(ratio):
        return ratio * ((ratio >= 0.5) & (ratio <= 5))

    in_head = torch.zeros_like(logits, dtype=torch.bool).scatter(1, heads, True)
    outside_q = 1 - sampler.exp().where(in_head, 0 * logits).sum(1, keepdim=True)
    outside_p = 1 - trainer.where(in_head, 0 * logits).sum(1, keepdim=True)
    # The sampler as modelled: itself on the head, proportional to the trainer outside it (or nothing there).
    outside = trainer * outside_q / outside_p if tail == "proportional" else torch.full_like(trainer, 1e-300)
    modelled = sampler.exp().where(in_head, outside)
    centre = modelled * band(trainer / modelled)
    weight = band(trainer[rows, sampled] / sampler.exp()[rows, sampled])

    def defining(moved):
        logprobs = torch.log_softmax(moved, -1)
        return -(advantages * (weight * logprobs[rows, sampled] - (centre * logprobs).sum(1))).sum().item()

    leaf = logits.clone().requires_grad_()
    ScoreCentering(centering_tail=tail)(softmax_terms(leaf, sampler, sampled, heads, advantages)).sum().backward()
    torch.testing.assert_close(leaf.grad, _numeric_gradient(defining, logits), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("mismatch", [0.0, 0.3, 3.0])
def test_full_support_is_unbiased_at_any_mismatch(mismatch):
    """LOSS-9."""
    torch.manual_seed(1)
    logits = torch.randn(101, dtype=torch.float64)
    sampler = torch.log_softmax(logits + mismatch * torch.randn_like(logits), -1)
    for tail in ("proportional", "none"):
        assert expected_gradient(ScoreCentering(centering_tail=tail), logits, sampler, 101).norm() < 1e-6


def _peaked(seed: int, vocabulary: int = 2000) -> torch.Tensor:
    """Logits whose 8 likeliest tokens hold about three quarters of the mass."""
    torch.manual_seed(seed)
    logits = torch.randn(vocabulary, dtype=torch.float64)
    logits[:8] += 7.0
    return logits


def test_on_policy_the_tail_makes_the_mean_gradient_zero_and_the_head_alone_does_not():
    """LOSS-10, at the head masses of the reference's table (0.755: 0.0914 head only, 0 with the tail)."""
    with_tail, head_only, mass = [], [], []
    for seed in range(8):
        logits = _peaked(seed)
        sampler = torch.log_softmax(logits, -1)
        mass.append(sampler.topk(8).values.exp().sum().item())
        with_tail.append(expected_gradient(ScoreCentering(), logits, sampler, 8).norm().item())
        head_only.append(expected_gradient(ScoreCentering(centering_tail="none"), logits, sampler, 8).norm().item())
    assert 0.6 < np.mean(mass) < 0.85
    assert max(with_tail) < 1e-6
    assert 0.05 < np.mean(head_only) < 0.15


def test_a_small_mismatch_leaves_a_small_bias_with_the_tail():
    """Reference A.7.2, third row: 0.0017 with the tail model against 0.0928 head only at a log mismatch of 0.3."""
    ratios = []
    for seed in range(8):
        logits = _peaked(seed)
        sampler = torch.log_softmax(logits + 0.3 * torch.randn_like(logits), -1)
        tail = expected_gradient(ScoreCentering(), logits, sampler, 8).norm().item()
        head = expected_gradient(ScoreCentering(centering_tail="none"), logits, sampler, 8).norm().item()
        ratios.append(tail / head)
    assert np.mean(ratios) < 0.1


def test_sampled_on_policy_gradients_average_to_zero_only_with_the_tail():
    """Monte Carlo over 400,000 sampled tokens: zero to sampling error with the tail, far from it head only."""
    logits, draws = _peaked(0, 701), 400_000
    sampler = torch.log_softmax(logits, -1)
    sampled = torch.multinomial(sampler.exp(), draws, replacement=True, generator=torch.Generator().manual_seed(3))
    counts = torch.bincount(sampled, minlength=701).double()
    heads = sampler.topk(8).indices
    distances = {}
    for tail in ("proportional", "none"):
        leaf = logits.clone().requires_grad_()
        terms = softmax_terms(leaf.expand(701, -1), sampler.expand(701, -1), torch.arange(701), heads.expand(701, -1))
        (ScoreCentering(centering_tail=tail)(terms) * counts).sum().div(draws).backward()
        # The standard error of the mean of (onehot_o - p), per entry sqrt(p (1 - p) / draws), as one norm.
        error = (sampler.exp() * (1 - sampler.exp()) / draws).sum().sqrt()
        distances[tail] = float(leaf.grad.norm() / error)
    assert distances["proportional"] < 2
    assert distances["none"] > 20


def test_centering_applies_where_the_sampled_token_is_masked():
    """LOSS-7: ratio 6 masks the policy term; the centre still moves the head tokens."""
    logits, sampler, sampled, heads, _ = _random_case(0, rows=1)
    leaf = logits.clone().requires_grad_()
    terms = softmax_terms(leaf, sampler, sampled, heads)
    terms = dataclasses.replace(terms, sampler_logprobs=terms.trainer_logprobs.detach() - np.log(6.0))
    ScoreCentering()(terms).sum().backward()
    assert leaf.grad.norm() > 1e-3
    assert Grpo()(terms).item() == 0


def test_a_head_that_covers_the_candidate_set_is_exact_and_absent_entries_are_ignored():
    """SAMP-9, by hand: set of two, q = (0.6, 0.4), p = (0.5, 0.5), the third head entry absent."""
    leaf = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    absent = torch.full((1, 1), -torch.inf, dtype=torch.float64)
    trainer = torch.log_softmax(leaf, -1)
    fields = dict(
        trainer_logprobs=trainer[:, 0],
        sampler_logprobs=LOG([0.6], dtype=torch.float64).log(),
        head_ids=torch.tensor([[4, 9, 0]]),
        head_trainer_logprobs=torch.cat([trainer, absent], 1),
        head_sampler_logprobs=torch.cat([LOG([[0.6, 0.4]], dtype=torch.float64).log(), absent], 1),
        candidate_counts=torch.tensor([2]),
    )
    terms = make_terms([1.0], [1.0], **fields)
    value = ScoreCentering()(terms)
    # -(5/6 log p_1 - (0.5 log p_1 + 0.5 log p_2)) with log p = log 0.5
    assert value.item() == pytest.approx((1 - 5 / 6) * np.log(0.5))
    value.sum().backward()
    assert leaf.grad.tolist()[0] == pytest.approx([-5 / 12, 5 / 12])


def test_statistics_count_what_each_loss_does():
    terms = make_terms([0.4, 0.7, 0.7, 1.5, 1.5, 6.0], [1, 1, -1, 1, -1, 1])
    figures = Grpo().statistics(terms)
    assert figures["masked"].tolist() == [True, False, False, False, False, True]
    assert figures["clipped_low"].tolist() == [False, False, True, False, False, False]
    assert figures["clipped_high"].tolist() == [False, False, False, True, False, True]
    figures = ScoreCentering().statistics(terms)
    assert figures["clipped_low"].tolist() == [True, True, True, False, False, False]
    assert figures["clipped_high"].tolist() == [False, False, False, True, True, True]


def test_head_mass_and_tail_scale_by_hand():
    """q head 0.5 + 0.3, p head 0.4 + 0.2: alpha = 0.2 / 0.4."""
    terms = make_terms(
        [1.0],
        [1.0],
        head_trainer_logprobs=LOG([[0.4, 0.2]], dtype=torch.float64).log(),
        head_sampler_logprobs=LOG([[0.5, 0.3]], dtype=torch.float64).log(),
    )
    figures = ScoreCentering().statistics(terms)
    assert figures["sampler_mass"].item() == pytest.approx(0.8)
    assert figures["tail_scale"].item() == pytest.approx(0.5)
    assert "tail_scale" not in ScoreCentering(centering_tail="none").statistics(terms)


def test_losses_are_configured_without_loading_torch():
    import subprocess
    import sys

    code = "import sys, agrpo.loss.grpo, agrpo.loss.score_centering; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
