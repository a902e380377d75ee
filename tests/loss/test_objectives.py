"""The further objectives against hand numbers and finite differences of their defining expressions."""

import dataclasses
import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_loss import make_terms

from agrpo.config import locate
from agrpo.loss.cispo import Cispo
from agrpo.loss.dapo import Dapo
from agrpo.loss.decoupled import Decoupled
from agrpo.loss.dr_grpo import DrGrpo
from agrpo.loss.grpo import Grpo
from agrpo.loss.gspo import Gspo
from agrpo.loss.tis import Tis

ROOT = Path(__file__).parents[2]
NAN = float("nan")


def samples_terms(ratios, advantages, samples, **fields):
    """Terms of several samples; sample indices as the planner gives them."""
    index = torch.tensor(samples)
    return make_terms(ratios, advantages, sample_index=index, num_samples=int(index.max()) + 1, **fields)


@pytest.mark.parametrize("sampler", [-95.0, -9999.0])
@pytest.mark.parametrize(
    "loss", [Grpo(), Dapo(), DrGrpo(length=7), Gspo(), Decoupled(), Decoupled(updates_per_step=2), Cispo(), Tis()]
)
def test_a_token_that_the_sampler_held_for_impossible_leaves_the_gradient_finite(loss, sampler):
    """exp(94) is infinite in float32, and 0 times infinite is NaN in backward though the token is masked."""
    trainer = torch.tensor([-1.0, -2.0, -1.5], requires_grad=True)
    terms = samples_terms(
        [1, 1, 1], [1, 1, 1], [0, 1, 1], trainer_logprobs=trainer, sampler_logprobs=torch.tensor([sampler, -2.0, -1.5]),
        proximal_logprobs=torch.tensor([-1.0, -2.0, -1.5]),
    )  # fmt: skip
    value = loss(terms)
    value.sum().backward()
    assert value.isfinite().all() and trainer.grad.isfinite().all()
    assert trainer.grad[1:].abs().min() > 0
    if isinstance(loss, Grpo | Gspo):
        assert trainer.grad[0] == 0


@pytest.mark.parametrize(
    ("loss", "ratio", "advantage", "expected"),
    [
        (Grpo(epsilon_high=0.28), 1.5, 1, -1.28),
        (Grpo(dual_clip=3.0), 4.0, -1, 3.0),  # without it 4
        (Grpo(dual_clip=3.0), 2.0, -1, 2.0),
        (Grpo(dual_clip=3.0), 4.0, 1, -1.2),
        (Dapo(), 1.5, 1, -1.28),
        (Dapo(), 0.7, -1, 0.8),
        (DrGrpo(), 1.1, 2, -2.2),
        # Weight times log p with p = 0.1 r.
        (Cispo(), 2.0, 1, -2 * math.log(0.2)),
        (Cispo(clip_max=1.5), 2.0, 1, -1.5 * math.log(0.2)),
        (Cispo(clip_min=0.5), 0.25, -1, 0.5 * math.log(0.025)),
        (Tis(), 1.5, 2, -3.0),
        (Tis(), 4.0, 2, -4.0),
        (Tis(action="mask"), 4.0, 2, 0.0),
        (Tis(action="mask", lower=0.5), 0.25, 2, 0.0),
        (Tis(lower=0.5), 0.25, 2, -1.0),
        # One update per step: the trained policy is the proximal one, r = 1, w = p / q.
        (Decoupled(), 1.5, 2, -3.0),
        (Decoupled(), 6.0, 2, 0.0),
    ],
)
def test_values(loss, ratio, advantage, expected):
    assert loss(make_terms([ratio], [advantage])).item() == pytest.approx(expected, abs=1e-12)


def test_a_whole_answers_ratio_is_the_geometric_mean_of_its_tokens():
    """Sample 0 has ratios 4 and 1, hence 2; sample 1 has 0.5 alone; the samples' terms alternate."""
    terms = samples_terms([4.0, 0.5, 1.0], [1.0, -1.0, 1.0], [0, 1, 0])
    loss = Gspo(epsilon=0.2, epsilon_high=0.3)
    assert loss(terms).tolist() == pytest.approx([-1.3, 0.8, -1.3])
    figures = loss.statistics(terms)
    assert figures["clipped_high"].tolist() == [True, False, True]
    assert figures["clipped_low"].tolist() == [False, True, False]
    assert figures["ratio"].tolist() == pytest.approx([4.0, 0.5, 1.0])
    assert not figures["masked"].any()


def test_importance_weights_of_tokens_and_answers():
    """Ratios 3 and 0.5 of one answer: product 1.5, geometric mean sqrt(1.5); the other answer's are 3 and 3."""
    terms = samples_terms([3.0, 0.5, 3.0, 3.0], [1.0] * 4, [0, 0, 1, 1])
    assert Tis(level="sequence", upper=5.0)(terms).tolist() == pytest.approx([-1.5, -1.5, -5.0, -5.0])
    root = math.sqrt(1.5)
    assert Tis(level="geometric", upper=2.5)(terms).tolist() == pytest.approx([-root, -root, -2.5, -2.5])
    masked = Tis(level="geometric", upper=2.5, action="mask")
    assert masked(terms).tolist() == pytest.approx([-root, -root, 0.0, 0.0])
    assert masked.statistics(terms)["masked"].tolist() == [False, False, True, True]
    assert masked.statistics(terms)["clipped_high"].tolist() == [False, False, True, True]
    assert not Tis(upper=2.5).statistics(terms)["masked"].any()


def test_a_long_answers_product_stays_finite():
    terms = samples_terms([2.0] * 1999, [1.0] * 1999, [0] * 1999)
    assert Tis(level="sequence", upper=5.0)(terms.__class__(**_fields(terms, torch.float32))).sum() == -5.0 * 1999


def _fields(terms, dtype):
    values = {f.name: getattr(terms, f.name) for f in dataclasses.fields(terms)}
    return {k: v.to(dtype) if torch.is_tensor(v) and v.is_floating_point() else v for k, v in values.items()}


def test_around_a_recomputed_policy_by_hand():
    """p / q = 1.8 and p0 / q = 1.2: r = 1.5 clipped to 1.2, weight 1.2."""
    loss = Decoupled(updates_per_step=4)
    terms = make_terms([1.8, 1.8], [1.0, -1.0])
    proximal = terms.sampler_logprobs + math.log(1.2)
    terms = dataclasses.replace(terms, proximal_logprobs=proximal)
    assert loss.wants_proximal and not Decoupled().wants_proximal
    assert loss(terms).tolist() == pytest.approx([-1.2 * 1.2, 1.2 * 1.5])
    assert loss.statistics(terms)["clipped_high"].tolist() == [True, False]
    assert loss.statistics(terms)["ratio"].tolist() == pytest.approx([1.8, 1.8])
    far = dataclasses.replace(terms, proximal_logprobs=terms.sampler_logprobs + math.log(7.0))
    assert loss(far).tolist() == [0.0, 0.0]
    assert loss.statistics(far)["masked"].all()


def test_an_interpolated_policy_by_hand():
    """Ratio 4 at ages 0, 1, 2, 4: proximal / sampler = 4, 1, 2, 4 ** 0.75; the clip is wide open."""
    loss = Decoupled(proximal="interpolate", epsilon=0.99, epsilon_high=9.0)
    terms = make_terms([4.0] * 4, [1.0] * 4, versions=torch.tensor([9, 8, 7, 5]), version=9)
    leaf = terms.trainer_logprobs
    value = loss(terms)
    assert value.tolist() == pytest.approx([-4.0] * 4)  # w r = p / q whatever the proximal policy
    narrow = Decoupled(proximal="interpolate", epsilon=0.5, epsilon_high=0.5)
    weights = np.array([4.0, 1.0, 2.0, 4**0.75])
    assert narrow(terms).tolist() == pytest.approx(list(-weights * np.minimum(4 / weights, 1.5)))
    value.sum().backward()
    assert leaf.grad.tolist() == pytest.approx([-4.0] * 4)
    lost = dataclasses.replace(terms, sampler_logprobs=torch.full((4,), -torch.inf, dtype=torch.float64))
    assert torch.isfinite(loss(lost)).all()


CASES = {
    "asymmetric": Grpo(epsilon_high=0.4, dual_clip=2.0),
    "wide": Dapo(),
    "constant": DrGrpo(),
    "clipped weight": Cispo(clip_min=0.6, clip_max=1.4),
    "whole answers": Gspo(epsilon=0.05, epsilon_high=0.1),
    "token": Tis(upper=1.3),
    "sequence": Tis(level="sequence", upper=1.3, lower=0.8),
    "geometric mask": Tis(level="geometric", upper=1.1, lower=0.9, action="mask"),
    "recomputed": Decoupled(updates_per_step=2),
    "interpolated": Decoupled(proximal="interpolate"),
}


def _defined(loss, p, q, advantages, samples, versions, held):
    """The sum of a loss written again in numpy; `held` are the log-probs at which constants are taken."""
    ratio, fixed = np.exp(p - q), np.exp(held - q)

    def per_sample(values, reduce):
        return np.array([reduce(values[samples == s]) for s in samples])

    def pessimistic(r, low, high):
        return np.minimum(r * advantages, np.clip(r, 1 - low, 1 + high) * advantages)

    match loss:
        case Cispo():
            terms = np.clip(fixed, loss.clip_min, loss.clip_max) * advantages * p
        case Gspo():
            terms = pessimistic(np.exp(per_sample(p - q, np.mean)), loss.epsilon, loss.epsilon_high)
        case Tis():
            reduce = {"token": None, "sequence": np.sum, "geometric": np.mean}[loss.level]
            weight = fixed if reduce is None else np.exp(per_sample(held - q, reduce))
            if loss.action == "mask":
                weight = weight * ((weight >= (loss.lower or 0)) & (weight <= loss.upper))
            terms = (
                np.clip(weight, (loss.lower or 0) * (loss.action != "mask"), loss.upper) * advantages * np.exp(p - held)
            )
        case Decoupled():
            proximal = q + 0.1
            if loss.proximal == "interpolate":
                proximal = q + np.clip((9 - 1 - versions) / np.maximum(9 - versions, 1), 0, 1) * (held - q)
            weight = np.exp(proximal - q)
            terms = weight * (weight <= 5) * pessimistic(np.exp(p - proximal), loss.epsilon, loss.high)
        case _:
            terms = pessimistic(ratio, loss.epsilon, loss.high)
            if loss.dual_clip:
                terms = np.where(advantages < 0, np.maximum(terms, loss.dual_clip * advantages), terms)
            terms = terms * ((fixed >= loss.clip_min) & (fixed <= loss.clip_max))
    return -terms.sum()


@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_finite_differences(name):
    """LOSS-12, through the log-probs of 23 terms of 5 samples, the detached parts held where they are."""
    loss, rng = CASES[name], np.random.default_rng(5)
    q, samples = rng.uniform(-3, -1, 23), np.sort(np.r_[np.arange(5), rng.integers(0, 5, 18)])
    p, advantages = q + rng.normal(0, 0.3, 23), rng.normal(size=23)
    versions = rng.integers(5, 9, 23)
    terms = samples_terms(
        np.ones(23), advantages, samples.tolist(),
        trainer_logprobs=torch.tensor(p, requires_grad=True), sampler_logprobs=torch.tensor(q),
        versions=torch.tensor(versions), version=9, proximal_logprobs=torch.tensor(q + 0.1),
    )  # fmt: skip
    value = loss(terms)
    assert value.sum().item() == pytest.approx(_defined(loss, p, q, advantages, samples, versions, p), rel=1e-10)
    value.sum().backward()
    numeric = np.zeros(23)
    for i in range(23):
        for sign in (1, -1):
            moved = p.copy()
            moved[i] += sign * 1e-6
            numeric[i] += sign * _defined(loss, moved, q, advantages, samples, versions, p) / 2e-6
    np.testing.assert_allclose(terms.trainer_logprobs.grad.numpy(), numeric, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", CASES)
def test_no_terms_give_no_loss(name):
    """LOSS-20."""
    loss, terms = CASES[name], make_terms([], [], num_samples=0)
    value = loss(terms).sum()
    value.backward()
    assert value.item() == 0
    assert all(len(v) == 0 for v in loss.statistics(terms).values())


def test_settings_that_do_not_go_together_are_refused():
    config = SimpleNamespace(
        advantage=SimpleNamespace(std_level="group"), run=SimpleNamespace(gradient_accumulation_steps=3)
    )
    (line,) = DrGrpo().problems(config)
    assert line.startswith("advantage.std_level must be null with this loss, got group")
    (line,) = Decoupled(updates_per_step=2).problems(config)
    assert line.startswith("loss.updates_per_step must divide run.gradient_accumulation_steps=3, got 2")
    config.advantage.std_level = None
    assert DrGrpo().problems(config) == Decoupled(updates_per_step=3).problems(config) == []


def test_every_objective_says_when_to_choose_it_and_the_page_says_the_same():
    page = (ROOT / "docs" / "losses.md").read_text()
    for path in sorted((ROOT / "conf" / "loss").glob("*.yaml")):
        kind = locate(re.search(r"^_target_: (\S+)", path.read_text(), re.M).group(1))
        assert "Choose it" in kind.__doc__, path.stem
        assert f"| `{path.stem}` | {kind.__doc__} |" in page, path.stem
