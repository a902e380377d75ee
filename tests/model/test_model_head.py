"""The head by slices of the vocabulary against logits made whole: values, gradients, families' scalings, candidate sets."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from agrpo.model import candidates, head
from agrpo.model.candidates import Kept
from agrpo.model.head import head_terms
from agrpo.model.head_torch import Scaling
from agrpo.types import Ragged

TERMS, HIDDEN, VOCABULARY, HEADS = 31, 17, 1009, 5
SCALINGS = {
    "plain": Scaling(),
    "temperature": Scaling(0.7),
    "logit_scale": Scaling(0.7, 0.25),
    "softcap": Scaling(1.3, 2.0, 3.0),
}


def case(dtype=torch.float64, terms=TERMS, bias=True, keep=0, seed=0):
    """Inputs of `head_terms` with two slices of logits that reach 10, and weights of the outputs."""
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(terms, HIDDEN, generator=random, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=random, dtype=torch.float64)
    offset = torch.randn(VOCABULARY, generator=random, dtype=torch.float64) if bias else None
    leaves = [None if x is None else x.to(dtype).requires_grad_() for x in (hidden, weight, offset)]
    targets = torch.randint(0, VOCABULARY, (terms,), generator=random)
    heads = torch.randint(0, VOCABULARY, (terms, HEADS), generator=random)
    heads[::3, 1] = targets[::3]  # the sampler's most likely tokens often hold the sampled one
    sets = None
    if keep:
        sizes = np.random.default_rng(seed).integers(1, keep, terms)
        drawn = np.random.default_rng(seed).integers(0, VOCABULARY, (terms, keep))
        sets = Ragged.of([[*drawn[i, :n], int(targets[i]), int(heads[i, 0])] for i, n in enumerate(sizes)])
    return leaves, targets, heads, sets


def whole(leaves, targets, heads, scaling, sets):
    """The same three outputs from [tokens, vocabulary] logits."""
    hidden, weight, bias = leaves
    logits = torch.nn.functional.linear(hidden, weight, bias) * scaling.multiplier
    if scaling.softcap is not None:
        logits = scaling.softcap * torch.tanh(logits / scaling.softcap)
    logits = logits / scaling.temperature
    full = torch.log_softmax(logits, -1)
    if sets is not None:
        outside = torch.ones_like(logits, dtype=torch.bool)
        for i in range(len(logits)):
            outside[i, torch.from_numpy(sets[i]).long()] = False
        logits = logits.masked_fill(outside, -torch.inf)
    logprobs = torch.log_softmax(logits, -1)
    entropy = -(full.exp() * full).sum(-1).detach()
    return logprobs.gather(1, targets[:, None]).squeeze(1), logprobs.gather(1, heads), entropy


def value(logprobs, head_logprobs):
    """A number that weighs every output differently; absent head tokens count nothing."""
    weights = torch.linspace(-1, 1.5, head_logprobs.numel(), dtype=logprobs.dtype).view_as(head_logprobs)
    present = head_logprobs.where(head_logprobs.isfinite(), head_logprobs.new_zeros(()))
    return (torch.linspace(1, -2, len(logprobs), dtype=logprobs.dtype) * logprobs).sum() + (weights * present).sum()


def check(scaling, sets, leaves, targets, heads, tolerance):
    exact = [None if x is None else x.detach().double().requires_grad_() for x in leaves]
    expected = whole(exact, targets, heads, scaling, sets)
    kept = None if sets is None else Kept.of(sets, "cpu")
    got = head_terms(*leaves, targets, heads, scaling, kept)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=tolerance, rtol=tolerance)
    assert not got[2].requires_grad
    value(*expected[:2]).backward()
    value(*got[:2]).backward()
    for ours, theirs in zip(leaves, exact, strict=True):
        if ours is not None:
            assert ours.grad.dtype == ours.dtype
            error = (ours.grad.double() - theirs.grad).norm() / theirs.grad.norm()
            assert float(error) <= tolerance


@pytest.fixture(params=[1 << 23, TERMS * 256, 1], ids=["one slice", "four slices", "least width"])
def slices(request, monkeypatch):
    monkeypatch.setitem(head.SLICE_LOGITS, "cpu", request.param)


@pytest.mark.parametrize("keep", [0, 23], ids=["full", "candidates"])
@pytest.mark.parametrize("name", SCALINGS)
def test_values_and_gradients_equal_those_of_whole_logits(name, keep, slices):
    leaves, targets, heads, sets = case(keep=keep)
    check(SCALINGS[name], sets, leaves, targets, heads, 1e-10)


@pytest.mark.parametrize("keep", [0, 23], ids=["full", "candidates"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.bfloat16, 4e-3)], ids=str)
def test_lower_precision_adds_its_rounding_once(dtype, tolerance, keep, monkeypatch):
    """bfloat16 inputs are summed in float32: values to 1e-5, gradients to the one rounding of their own dtype."""
    monkeypatch.setitem(head.SLICE_LOGITS, "cpu", 1)
    leaves, targets, heads, sets = case(dtype, keep=keep)
    check(SCALINGS["softcap"], sets, leaves, targets, heads, tolerance)


def test_a_large_common_offset_and_a_certain_token_lose_nothing():
    """Logits near 1,000 that differ by 40: probabilities of 1 and e^-40, entropy 0 to rounding, no overflow."""
    hidden = torch.ones(1, 2, dtype=torch.float64, requires_grad=True)
    weight = torch.full((700, 2), 500.0, dtype=torch.float64)
    weight[650] += 20
    weight.requires_grad_()
    targets, heads = torch.tensor([650]), torch.tensor([[3]])
    logprobs, head_logprobs, entropy = head_terms(hidden, weight, None, targets, heads, Scaling(), None)
    assert logprobs.item() == pytest.approx(-699 * np.exp(-40), rel=1e-2, abs=1e-12)
    assert head_logprobs.item() == pytest.approx(-40)
    assert entropy.item() == pytest.approx(699 * 40 * np.exp(-40), rel=0.1, abs=1e-12)
    logprobs.sum().backward()
    assert hidden.grad.isfinite().all() and weight.grad.isfinite().all()


def test_a_candidate_set_by_hand():
    """Logits log 1, log 2, log 3, log 4; the set {1, 3} gives 2/6 and 4/6, its gradient stays inside."""
    hidden = torch.eye(1, dtype=torch.float64).requires_grad_()
    weight = torch.tensor([[1.0], [2.0], [3.0], [4.0]], dtype=torch.float64).log().requires_grad_()
    kept = Kept.of(Ragged.of([[3, 1, 3]]), "cpu")  # order and repetition say nothing
    targets, heads = torch.tensor([1]), torch.tensor([[3, 2]])
    logprobs, head_logprobs, entropy = head_terms(hidden, weight, None, targets, heads, Scaling(), kept)
    assert logprobs.exp().tolist() == pytest.approx([1 / 3])
    assert head_logprobs.exp()[0].tolist() == pytest.approx([2 / 3, 0])
    assert entropy.item() == pytest.approx(-sum(p * np.log(p) for p in (0.1, 0.2, 0.3, 0.4)))
    logprobs.sum().backward()
    assert weight.grad[:, 0].tolist() == pytest.approx([0, 2 / 3, 0, -2 / 3])
    assert hidden.grad.item() == pytest.approx(2 / 3 * np.log(2 / 4))


@pytest.mark.parametrize("keep", [0, 7], ids=["full", "candidates"])
def test_gradients_equal_finite_differences(keep):
    (hidden, weight, bias), targets, heads, sets = case(terms=3, keep=keep)
    weight, bias = weight[:53].detach().requires_grad_(), bias[:53].detach().requires_grad_()
    targets, heads = targets % 53, heads % 53
    kept = None if sets is None else Kept.of(Ragged(sets.values % 53, sets.offsets), "cpu")

    def total(*leaves):
        return value(*head_terms(*leaves, targets, heads, SCALINGS["softcap"], kept)[:2])

    assert torch.autograd.gradcheck(total, (hidden, weight, bias), eps=1e-6, atol=1e-6)


def test_a_frozen_head_gets_no_gradient():
    (hidden, weight, _), targets, heads, _ = case(bias=False)
    weight.requires_grad_(False)
    head_terms(hidden, weight, None, targets, heads, Scaling(), None)[0].sum().backward()
    assert weight.grad is None and hidden.grad.norm() > 0


class Largest(TorchDispatchMode):
    """Number of elements of the largest tensor that any operation made."""

    elements = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        made = operation(*args, **(kwargs or {}))
        tensors = [x for x in (made if isinstance(made, tuple) else (made,)) if isinstance(x, torch.Tensor)]
        self.elements = max([self.elements, *(x.numel() for x in tensors)])
        return made


@pytest.mark.parametrize("keep", [0, 23], ids=["full", "candidates"])
def test_logits_of_all_terms_never_exist(keep, monkeypatch):
    """LOSS-14: nothing is larger than one slice of the logits or than the weight, forward and backward."""
    monkeypatch.setitem(head.SLICE_LOGITS, "cpu", 1)
    monkeypatch.setattr(candidates, "_ENTRIES", 1024)
    leaves, targets, heads, sets = case(torch.float32, terms=211, keep=keep)
    kept = None if sets is None else Kept.of(sets, "cpu")
    with Largest() as largest:
        value(*head_terms(*leaves, targets, heads, SCALINGS["softcap"], kept)[:2]).backward()
    assert largest.elements <= max(211 * 256, VOCABULARY * HIDDEN) < 211 * VOCABULARY


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999), terms=st.integers(1, 13), keep=st.integers(0, 40), name=st.sampled_from([*SCALINGS]))
def test_random_cases(seed, terms, keep, name):
    leaves, targets, heads, sets = case(terms=terms, keep=max(keep, 2) if keep else 0, seed=seed)
    check(SCALINGS[name], sets, leaves, targets, heads, 1e-9)
