"""The auxiliary loss of mixtures of experts: its value, its gradient, its share of a step, and what is refused."""

import numpy as np
import pytest
import torch
import transformers as hf
from model_build import group, make_model, make_row
from model_rank import NoTokenizer
from safetensors import safe_open
from test_model_packed import _assert_same, _gradients

from agrpo.config.model_folder import model_problems
from agrpo.errors import ConfigError
from agrpo.loss.score_centering import ScoreCentering
from agrpo.model import checkpoint, load
from agrpo.model.moe import Balance, balance_of
from agrpo.model.optim import Updater
from agrpo.model.terms import DeviceRow, sequence_row, token_terms
from agrpo.model.weights import checkpoint_names, full_tensors
from agrpo.sections import Model, Optimizer
from agrpo.train.loop import Trainer
from agrpo.train.parity import ParityProbe
from agrpo.train.ranks import Ranks, Work

TOKENS = np.random.default_rng(3).integers(3, 61, 23)


def _prepared(family="qwen3_moe", **section):
    return load.prepare(make_model(family), Model(path="-", **section))


def _aux(model, row):
    return token_terms(model, DeviceRow.of(row, "cpu"), 1.0, want_head=True).aux_loss


def test_by_hand():
    """Two layers, two tokens, three experts, one chosen: choices [3 1 0], probabilities from logits of ln."""
    first = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25]]).log()
    second = torch.tensor([[0.8, 0.1, 0.1], [0.4, 0.3, 0.3]]).log()
    expected = 3 * (3 / 4 * (0.5 + 0.25 + 0.8 + 0.4) / 4 + 1 / 4 * (0.25 + 0.5 + 0.1 + 0.3) / 4)
    assert Balance(1.0, 1).of((first, second)).item() == pytest.approx(expected)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
def test_one_sequence_has_the_loss_and_the_gradients_of_transformers(family):
    model, plain = _prepared(family), make_model(family, "eager")
    got = _aux(model, sequence_row(TOKENS))
    expected = plain(input_ids=torch.from_numpy(TOKENS)[None], output_router_logits=True).aux_loss
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    got, expected = _gradients(model, got), _gradients(plain, expected)
    _assert_same({n: got[n] for n in expected}, expected, 1e-4)


def test_a_shared_token_counts_once():
    """The routers' logits of each sample alone, taken once per packed token (LOSS-21)."""
    samples = group(1, [7, 11, 13, 11])
    row, plain = make_row(samples), make_model("qwen3_moe", "eager")
    assert row.num_tokens < sum(len(s.token_ids) for s in samples)
    seen = {}
    for sample in samples:
        ids = torch.from_numpy(sample.token_ids).long()
        layers = plain(input_ids=ids[None], output_router_logits=True).router_logits
        for at in range(len(ids)):
            # A token is shared only where the next one is equal too.
            seen.setdefault((at, *ids[: at + 2].tolist()), torch.stack([layer[at] for layer in layers]).detach())
    assert len(seen) == row.num_tokens
    probabilities = torch.stack(list(seen.values())).double().softmax(-1).flatten(0, 1).numpy()  # [tokens * layers, E]
    chosen = np.argsort(-probabilities, 1)[:, :2]
    frequency = np.bincount(chosen.ravel(), minlength=5) / len(probabilities)
    expected = 5 * (frequency * probabilities.mean(0)).sum()
    assert _aux(_prepared(), row).item() == pytest.approx(expected, rel=1e-5)


def test_checkpointing_keeps_the_gradient_and_no_gradient_means_no_loss():
    row, grads = make_row(group(6, [7, 11, 5])), []
    for is_checkpointed in (False, True):
        model = _prepared(gradient_checkpointing=is_checkpointed)
        grads.append(_gradients(model, _aux(model, row)))
    _assert_same(grads[1], grads[0], 1e-5)
    with torch.no_grad():
        assert _aux(model, row) is None


def test_a_step_adds_the_mean_auxiliary_loss_of_its_rows():
    """Two microbatches: policy losses over the tokens of the step, auxiliary losses by half each, times 0.1."""
    rows = [make_row(group(1, [7, 5])), make_row(group(2, [3, 4, 6]))]
    total = float(sum(row.num_trained_tokens for row in rows))
    model, same, ranks = _prepared(), _prepared(), Ranks(use_cpu=True, timeout_s=60)
    updater = Updater(model, Optimizer(learning_rate=0.0, max_grad_norm=0), None)
    parity = ParityProbe(ranks.device, is_truncated=False, warn=None, stop=None)
    trainer = Trainer(ranks, model, updater, ScoreCentering(), None, None, None, parity, 1.0, 0, 1)
    shares = tuple(np.full(len(row.sample_tokens), 1 / total, np.float32) for row in rows)
    trainer.step(Work("step", 1, tuple(rows), shares))
    trainer.figures.record(trainer.window, 1)

    terms = [token_terms(same, DeviceRow.of(row, "cpu"), 1.0, want_head=True) for row in rows]
    aux = sum(t.aux_loss for t in terms) / 2
    loss = sum(ScoreCentering()(t).sum() for t in terms) / total + 0.1 * aux
    norm = torch.cat([g.flatten() for g in _gradients(same, loss).values()]).norm()
    record = trainer.window.record(1)
    assert record["aux_loss"] == pytest.approx(aux.item(), rel=1e-5)
    assert record["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert record["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


def test_coefficient_of_the_model_or_the_section_and_off():
    assert balance_of(_prepared()) == Balance(0.1, 2)
    assert balance_of(_prepared(router_aux_loss_coef=0.5)) == Balance(0.5, 2)
    off = _prepared(router_aux_loss_coef=0.0)
    assert balance_of(off) is None
    assert _aux(off, sequence_row(TOKENS)) is None
    assert balance_of(_prepared("qwen3")) is None


def test_refusals():
    with pytest.raises(
        ConfigError, match="router_aux_loss_coef is for mixtures of experts .* Qwen3ForCausalLM has none"
    ):
        _prepared("qwen3", router_aux_loss_coef=0.1)
    with pytest.raises(ConfigError, match="use_reentrant must be false with an auxiliary loss"):
        _prepared(gradient_checkpointing_kwargs={"use_reentrant": True})
    _prepared(gradient_checkpointing_kwargs={"use_reentrant": True}, router_aux_loss_coef=0.0)


@pytest.mark.parametrize(("family", "lines"), [("qwen3", 1), ("qwen3_moe", 0), ("qwen3_next", 0)])
def test_a_coefficient_for_a_dense_model_is_refused_from_its_config_alone(tmp_path, family, lines):
    make_model(family, "eager").save_pretrained(tmp_path)
    found = list(model_problems(Model(path=str(tmp_path), router_aux_loss_coef=0.1)))
    assert len(found) == lines and all("router_aux_loss_coef is for mixture-of-experts" in line for line in found)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
def test_names_are_those_of_the_files_and_the_export_reloads(tmp_path, family):
    model = _prepared(family)
    make_model(family, "eager").save_pretrained(tmp_path / "stored")
    with safe_open(tmp_path / "stored" / "model.safetensors", "pt") as stored:
        assert set(checkpoint_names(model)) == set(stored.keys())
        for name, tensor in full_tensors(model):
            assert torch.equal(tensor, stored.get_tensor(name)), name
    checkpoint.export(model, NoTokenizer(), tmp_path / "out", torch.float32)
    loaded, plain = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out"), make_model(family, "eager").eval()
    ids = torch.from_numpy(TOKENS)[None]
    torch.testing.assert_close(loaded(input_ids=ids).logits, plain(input_ids=ids).logits, atol=1e-5, rtol=0)
