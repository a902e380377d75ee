"""Sharding changes nothing: 2 ranks against 1 and against none, and checkpoints over a change of ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from model_build import make_model
from model_rank import NoTokenizer, aux_share, steps_of_rows
from test_model_vlm import CONFIGS
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from agrpo.loss.score_centering import ScoreCentering
from agrpo.model import checkpoint
from agrpo.model.load import load_model
from agrpo.model.optim import Updater
from agrpo.model.shard import shard
from agrpo.model.terms import DeviceRow, token_terms
from agrpo.model.weights import full_tensors
from agrpo.sections import Model, Optimizer

HERE = Path(__file__).parent
OPTIMIZER = Optimizer(learning_rate=1e-2, max_grad_norm=0.05, weight_decay=0.1)


def _run_ranks(folder: Path, world_size: int) -> dict:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "model_rank.py"), str(folder)]
    ranks = [
        subprocess.Popen([*command, str(r), str(world_size)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for r in range(world_size)
    ]
    try:
        for rank in ranks:
            output = rank.communicate(timeout=240)[0].decode()
            assert rank.returncode == 0, output
            assert "returned a view tensor" not in output  # FSDP2's hooks would be lost with an operation in place
    finally:
        for rank in ranks:
            rank.kill()
    return _seen(folder, world_size) if (folder / "precision").exists() else {}


def _seen(folder: Path, world_size: int) -> dict:
    return torch.load(folder / f"seen{world_size}.pt", weights_only=False)


def _folder(tmp_path: Path, family: str, precision: str) -> Path:
    make_model(family, "eager").save_pretrained(tmp_path / "model")
    (tmp_path / "precision").write_text(precision)
    return tmp_path


def _same(got: dict, expected: dict, tolerance: float) -> None:
    assert got.keys() == expected.keys()
    for name, reference in expected.items():
        assert float((got[name] - reference).norm()) <= tolerance * max(float(reference.norm()), 1e-3), name


FAMILIES = ("gemma2", "qwen3_moe", "qwen3_vl")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """One folder for each model that two ranks have trained, one after the other: a start of ranks is dear."""
    folder = tmp_path_factory.mktemp("trained")
    for name, family, precision in (
        ("tied", "llama", "no"), ("hybrid", "qwen3_next", "no"), ("mixed", "qwen3", "bf16"), *((n, n, "no") for n in FAMILIES)
    ):  # fmt: skip
        (folder / name).mkdir()
        if family in CONFIGS:
            torch.manual_seed(7)
            AutoModelForImageTextToText.from_config(CONFIGS[family]()).save_pretrained(folder / name / "model")
            (folder / name / "precision").write_text(precision)
        else:
            _folder(folder / name, family, precision)
    (folder / "copies").mkdir()
    (folder / "copies" / "model").symlink_to(folder / "tied" / "model")
    (folder / "copies" / "precision").write_text("no")
    (folder / "copies" / "replicate").write_text("2")
    _run_ranks(folder, 2)
    return folder


@pytest.fixture(scope="module")
def tied(trained):
    """The tied family at full precision on 2 ranks and on 1."""
    folder = trained / "tied"
    return folder, _run_ranks(folder, 1), _seen(folder, 2)


def test_two_ranks_equal_one(tied):
    _, one, two = tied
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-4)
    assert two["norms"] == pytest.approx(one["norms"], rel=1e-4)
    _same(two["grads"], one["grads"], 1e-4)
    _same(two["weights"], one["weights"], 1e-4)


def test_copies_of_the_sharded_model_equal_one_rank(tied, trained):
    """HSDP: two copies of one shard each; gradients are summed over both."""
    one, copies = tied[1], _seen(trained / "copies", 2)
    assert copies["losses"] == pytest.approx(one["losses"], rel=1e-4)
    assert copies["norms"] == pytest.approx(one["norms"], rel=1e-4)
    _same(copies["grads"], one["grads"], 1e-4)
    _same(copies["weights"], one["weights"], 1e-4)


def _unsharded(folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and last weights of the same steps in this process."""
    section = Model(path=str(folder / "model"), precision="no")
    model = load_model(section, "cpu")
    shard(model, section, None)
    updater, losses = Updater(model, OPTIMIZER, None), []
    for rows in steps_of_rows():
        total, losses = sum(r.num_trained_tokens for r in rows), [*losses, 0.0]
        for row in rows:
            terms = token_terms(model, DeviceRow.of(row, "cpu"), 0.7, want_head=True)
            loss = ScoreCentering()(terms).sum() / total + aux_share(model, terms, len(rows))
            updater.backward(loss)
            losses[-1] += loss.item()
        updater.step()
    return losses, dict(full_tensors(model))


def test_one_rank_equals_no_sharding(tied):
    folder, one, _ = tied
    losses, weights = _unsharded(folder)
    assert losses == pytest.approx(one["losses"], rel=1e-5)
    _same(weights, one["weights"], 1e-5)


def test_a_hybrid_of_experts_on_two_ranks_equals_no_sharding(trained):
    """Gated DeltaNet layers, experts and their auxiliary loss."""
    folder = trained / "hybrid"
    two = _seen(folder, 2)
    losses, weights = _unsharded(folder)
    assert two["losses"] == pytest.approx(losses, rel=1e-4)
    _same(two["weights"], weights, 1e-4)


def test_names_are_those_of_the_checkpoint_and_tied_weights_come_once(tied):
    folder, _, two = tied
    stored = AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
    assert two["names"] == list(two["weights"])
    assert set(two["names"]) == set(stored) - {"lm_head.weight"}
    assert all(two["weights"][n].shape == stored[n].shape for n in two["names"])


@pytest.mark.parametrize("world_size", [1, 2])
def test_checkpoints_load_without_sharding_and_go_on_alike(tied, world_size):
    folder, one, _ = tied
    section = Model(path=str(folder / "model"), precision="no")
    model = load_model(section, "cpu")
    updater = Updater(model, OPTIMIZER, None)
    files = checkpoint.load(folder / f"checkpoints{world_size}" / "step-000002", model, updater)
    assert files == {"trainer.json": {"step": 2}}
    _same(dict(full_tensors(model)), one["weights"], 1e-4)
    state = updater.optimizer.state[updater.parameters[0]]
    assert float(state["step"]) == 2
    assert float(state["exp_avg_sq"].sum()) > 0


def test_export_loads(tied):
    folder, _, two = tied
    loaded = AutoModelForCausalLM.from_pretrained(folder / "exported2")
    assert loaded.dtype is torch.float32
    _same({n: p.detach() for n, p in loaded.named_parameters()}, two["weights"], 0.0)


@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_equal_no_sharding_for_further_families(trained, name):
    """Softcaps and windows, a mixture of experts, the text of an image model."""
    two, (losses, weights) = _seen(trained / name, 2), _unsharded(trained / name)
    assert two["losses"] == pytest.approx(losses, rel=1e-4)
    _same(two["weights"], weights, 1e-4)


def test_mixed_precision_keeps_float32_masters_and_exports_bfloat16(trained):
    folder = trained / "mixed"
    two = _seen(folder, 2)
    assert two["dtypes"] == {"torch.float32"}
    assert two["grads"]["lm_head.weight"].dtype is torch.float32
    loaded = AutoModelForCausalLM.from_pretrained(folder / "exported2")
    assert loaded.dtype is torch.bfloat16
    _same(
        {n: p.detach() for n, p in loaded.named_parameters()}, {n: t.bfloat16() for n, t in two["weights"].items()}, 0.0
    )
    # A sharded bf16 step is the unsharded autocast step up to bf16 rounding.
    section = Model(path=str(folder / "model"), precision="bf16")
    model = load_model(section, "cpu")
    shard(model, section, None)
    rows = steps_of_rows()[0]
    total = sum(r.num_trained_tokens for r in rows)
    for row in rows:
        (ScoreCentering()(token_terms(model, DeviceRow.of(row, "cpu"), 0.7, want_head=True)).sum() / total).backward()
    grads = torch.cat([p.grad.flatten() for p in model.parameters()])
    sharded = torch.cat([g.flatten() for g in two["grads"].values()])
    assert float(torch.cosine_similarity(grads, sharded, dim=0)) > 0.99
    assert float(grads.norm() / sharded.norm()) == pytest.approx(1, abs=0.03)


def test_a_tokenizer_is_saved_beside_the_model(tmp_path):
    saved = []

    class Tokenizer(NoTokenizer):
        def save_pretrained(self, path):
            saved.append(Path(path))

    checkpoint.export(make_model("qwen3"), Tokenizer(), tmp_path / "out", None)
    assert saved[0].parent == tmp_path
    assert (tmp_path / "out" / "config.json").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
