"""Loading, refusals, the optimizer update, and checkpoints of one process."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from model_build import FAMILIES, group, make_model, make_row
from model_rank import NoTokenizer

from agrpo.config import checkpoint_folder
from agrpo.errors import ConfigError
from agrpo.loss.score_centering import ScoreCentering
from agrpo.model import attention, checkpoint, load
from agrpo.model.optim import Updater, open_optimizer, parse_options
from agrpo.model.shard import shard
from agrpo.model.terms import DeviceRow, token_terms
from agrpo.model.tokenizer import load_tokenizer
from agrpo.model.weights import checkpoint_names, full_tensors
from agrpo.sections import Fsdp, Lora, Model, Optimizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model") / "qwen3"
    make_model("qwen3", "eager").save_pretrained(path)
    return path


def _loss(model, seed=1):
    row = make_row(group(seed, [7, 5]))
    return ScoreCentering()(token_terms(model, DeviceRow.of(row, "cpu"), 1.0, want_head=True)).mean()


def test_dtype_of_the_section_and_of_init_kwargs_which_wins(folder):
    assert load.load_model(Model(path=str(folder)), "cpu").dtype is torch.float32
    model = load.load_model(Model(path=str(folder), dtype="bfloat16"), "cpu")
    assert model.dtype is torch.bfloat16
    assert load.load_model(Model(path=str(folder), init_kwargs={"dtype": "float16"}), "cpu").dtype is torch.float16


def test_every_rank_builds_the_model_with_the_same_back_end_and_precision(folder):
    section, before = Model(path=str(folder), attention_backend="sdpa", tf32=True), torch.backends.cuda.matmul.allow_tf32
    try:
        read = load.load_model(section, "cpu")
        torch.backends.cuda.matmul.allow_tf32 = False
        built = load.skeleton(section)
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert built.config._attn_implementation == read.config._attn_implementation == "agrpo_tree_sdpa"


def test_a_back_end_is_checked_where_the_model_will_run(folder):
    section = Model(path=str(folder), attention_backend="varlen")
    with pytest.raises(ConfigError, match="GPU"):
        load.load_model(section, "cpu")
    with pytest.raises(ConfigError, match="GPU"):
        load.load_model(section, "meta", runs_on="cpu")


def test_bfloat16_weights_without_sharding_stay_and_warn(folder, caplog):
    section = Model(path=str(folder), dtype="bfloat16", precision="bf16")
    model = load.load_model(section, "cpu")
    shard(model, section, None)
    updater = Updater(model, Optimizer(), None)
    updater.backward(_loss(model))
    updater.step()
    assert "stay in torch.bfloat16" in caplog.text
    assert model.dtype is torch.bfloat16
    assert {s["exp_avg"].dtype for s in updater.optimizer.state.values()} == {torch.bfloat16}


def test_gradient_checkpointing_is_on_by_default_and_can_be_off(folder):
    assert load.load_model(Model(path=str(folder)), "cpu").model.layers[0].gradient_checkpointing
    model = load.load_model(Model(path=str(folder), gradient_checkpointing=False), "cpu")
    assert not model.model.layers[0].gradient_checkpointing


RANDOM = {
    "attention and MLP": (hf.SeedOssConfig, {}),
    "layer": (hf.OPTConfig, {"ffn_dim": 40, "word_embed_proj_dim": 24, "layerdrop": 0.5}),
    "router jitter": (hf.MixtralConfig, {"num_local_experts": 5, "router_jitter_noise": 0.1}),
    "sampled experts": (hf.PhimoeConfig, {"num_local_experts": 5}),
}


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": False}, {"lora": Lora(enabled=True, r=3)}])
@pytest.mark.parametrize("kind", RANDOM)
def test_nothing_of_the_model_is_random_in_training(kind, options):
    config, extra = RANDOM[kind]
    config = config(vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=2, head_dim=6, initializer_range=0.2, **extra)  # fmt: skip
    attention.register()
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
    model = load.prepare(model, Model(path="-", precision="no", **options))
    shard(model, Model(path="-", precision="no"), None)
    row = DeviceRow.of(make_row(group(1, [7, 5])), "cpu")
    first, second = (token_terms(model, row, 1.0, want_head=False).trainer_logprobs for _ in range(2))
    assert torch.equal(first, second)


def test_the_dropout_of_an_adapter_is_on_and_reaches_nothing_else():
    model = make_model("qwen3")
    model.model.extra = torch.nn.Dropout(0.3)
    load.prepare(model, Model(path="-", lora=Lora(enabled=True, r=3, dropout=0.5)))
    active = {name for name, m in model.named_modules() if isinstance(m, torch.nn.Dropout) and m.training and m.p}
    assert active and all("lora_dropout" in name for name in active)


@pytest.mark.parametrize("is_on", [True, False])
def test_layers_are_computed_again_in_backward(is_on):
    model = load.prepare(make_model("qwen3"), Model(path="-", gradient_checkpointing=is_on))
    calls = []
    model.model.layers[1].self_attn.q_proj.register_forward_hook(lambda *args: calls.append(1))
    _loss(model).backward()
    assert len(calls) == 1 + is_on


@pytest.mark.parametrize(
    ("path", "text"),
    [("a/missing/folder", "model.path: a/missing/folder cannot be loaded"), ("empty", "cannot be loaded")],
)
def test_what_cannot_be_loaded_is_one_line(tmp_path, monkeypatch, path, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=text) as refused:
        load.load_model(Model(path=path), "cpu")
    assert "\n" not in str(refused.value)


def test_a_folder_without_weights_is_one_line(folder, tmp_path):
    shutil.copy(folder / "config.json", tmp_path)
    with pytest.raises(ConfigError, match="model.path: .* cannot be loaded"):
        load.load_model(Model(path=str(tmp_path)), "cpu")


def test_old_transformers_sinks_and_other_layers_are_refused():
    load.require_transformers("5.2.0")
    with pytest.raises(ConfigError, match=r"5\.1\.9 is too old, 5\.2\.0"):
        load.require_transformers("5.1.9")
    kind, _ = FAMILIES["qwen3"]
    with pytest.raises(ConfigError, match="chunked_attention"):
        load.refuse_config(kind(num_hidden_layers=1, layer_types=["chunked_attention"]))
    sinks = hf.GptOssForCausalLM(
        hf.GptOssConfig(vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
                        num_key_value_heads=1, head_dim=4, num_local_experts=2, layer_types=["full_attention"])
    )  # fmt: skip
    with pytest.raises(ConfigError, match="attention sinks"):
        load.refuse_model(sinks)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (hf.NemotronConfig, "does not get the layout of a row"),
        (hf.StableLmConfig, "does not get the layout of a row"),
        (hf.DogeConfig, "makes a mask of its own"),
        (hf.BertConfig, "sees later tokens"),
    ],
)
def test_attention_that_cannot_be_packed_is_refused_when_the_model_is_loaded(config, text, tmp_path):
    config = config(vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=1, num_attention_heads=4,
                    num_key_value_heads=2, head_dim=6)  # fmt: skip
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"model.path: .*{text}.*choose a model of another family") as refused:
        load.load_model(Model(path=str(tmp_path)), "cpu")
    assert "\n" not in str(refused.value)


def test_unknown_fsdp_options_and_several_ranks_without_fsdp_are_refused(folder):
    from agrpo.model.shard import _arguments

    with pytest.raises(ConfigError, match="model.fsdp.options.version is unknown"):
        _arguments({"version": 1}, None, None)
    assert Fsdp().enabled is None


def test_tokenizer_pads_left_with_eos(tmp_path):
    from tokenizers import Tokenizer, models

    raw = Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    hf.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>").save_pretrained(tmp_path / "eos")
    hf.PreTrainedTokenizerFast(tokenizer_object=raw).save_pretrained(tmp_path / "none")
    tokenizer = load_tokenizer(Model(path="-", tokenizer_path=str(tmp_path / "eos")))
    assert (tokenizer.padding_side, tokenizer.pad_token_id) == ("left", 1)
    with pytest.raises(ConfigError, match="no EOS token"):
        load_tokenizer(Model(path=str(tmp_path / "none")))


def test_vision_language_checkpoints_train_their_text_model_alone():
    text = dict(vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=1, num_attention_heads=4,
                num_key_value_heads=2, head_dim=6, sliding_window=5, layer_types=["full_attention"])  # fmt: skip
    vision = dict(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = hf.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    config.architectures = ["Gemma3ForConditionalGeneration"]
    assert load._loader(config) is hf.AutoModelForImageTextToText
    model = load.prepare(hf.Gemma3ForConditionalGeneration(config), Model(path="-", gradient_checkpointing=False))
    trainable, frozen = load.count_parameters(model)
    assert trainable == sum(p.numel() for p in model.model.language_model.parameters())
    assert frozen == sum(p.numel() for p in model.parameters()) - trainable > 0
    assert all("vision" not in name and "projector" not in name for name in checkpoint_names(model))


def test_weight_decay_leaves_norms_alone_and_options_parse(folder):
    model = load.load_model(Model(path=str(folder)), "cpu")
    groups = open_optimizer(model, Optimizer(weight_decay=0.1, options="amsgrad=True,foreach=False")).param_groups
    assert [g["weight_decay"] for g in groups] == [0.1, 0.0]
    assert all(p.ndim == 1 for p in groups[1]["params"])
    assert parse_options("a=1e-3, b=x") == {"a": 1e-3, "b": "x"}
    with pytest.raises(ConfigError, match="k=v"):
        parse_options("fused")
    with pytest.raises(ConfigError, match="optimizer.name must be one of adafactor"):
        open_optimizer(model, Optimizer(name="adamm"))
    with pytest.raises(ConfigError, match="optimizer.options"):
        open_optimizer(model, Optimizer(options={"beta9": 1}))
    for name, text in (
        ("torch.optim.Muon", "torch.optim.Muon .* cannot train this model: .*2D"),
        ("torch.optim.LBFGS", "the loss several times"),
        ("torch.optim.lr_scheduler", "which is none"),
        ("torch.nn.Linear", "which is none"),
    ):
        with pytest.raises(ConfigError, match=f"optimizer.name.*{text}") as refused:
            open_optimizer(model, Optimizer(name=name))
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "warmup", "expected"),
    [
        ("constant", 0, [1, 1, 1, 1, 1]),
        ("constant", 2, [0, 0.5, 1, 1, 1]),
        ("constant_with_warmup", 0.5, [0, 0.5, 1, 1, 1]),
        ("linear", 0, [1, 0.75, 0.5, 0.25, 0]),
        ("cosine", 0, [(1 + math.cos(math.pi * i / 4)) / 2 for i in range(5)]),
    ],
)
def test_schedules(folder, kind, warmup, expected):
    section = Optimizer(learning_rate=0.5, lr_scheduler_type=kind, warmup_steps=warmup)
    updater = Updater(torch.nn.Linear(3, 2), section, 4)
    rates = []
    for _ in range(5):
        updater.parameters[0].grad = torch.zeros_like(updater.parameters[0])
        rates.append(updater.step().learning_rate)
    assert rates == pytest.approx([0.5 * e for e in expected])


def test_a_decaying_schedule_needs_the_number_of_steps():
    for section in (Optimizer(lr_scheduler_type="cosine"), Optimizer(warmup_steps=0.1)):
        with pytest.raises(ConfigError, match="run.max_steps"):
            Updater(torch.nn.Linear(3, 2), section, None)


def test_clipping_returns_the_norm_before_and_applies_the_limit():
    """SGD at rate 1: gradient (3, 4) has norm 5 and moves the weight by (0.6, 0.8)."""
    model = torch.nn.Linear(2, 1, bias=False)
    before = model.weight.detach().clone()
    updater = Updater(model, Optimizer(name="sgd", learning_rate=1.0), None)
    updater.backward((model.weight * torch.tensor([[3.0, 4.0]])).sum())
    update = updater.step()
    assert update.grad_norm == pytest.approx(5)
    torch.testing.assert_close(before - model.weight.detach(), torch.tensor([[0.6, 0.8]]), atol=1e-5, rtol=0)


def test_loss_scaling_is_undone_and_an_overflow_skips_the_update():
    model = torch.nn.Linear(2, 1, bias=False)
    updater = Updater(model, Optimizer(name="sgd", learning_rate=1.0, max_grad_norm=0), None, scaled=True)
    before = model.weight.detach().clone()
    updater.backward((model.weight * torch.tensor([[3.0, 4.0]])).sum())
    assert updater.step().grad_norm == pytest.approx(5)
    torch.testing.assert_close(before - model.weight.detach(), torch.tensor([[3.0, 4.0]]))
    updater.backward((model.weight * torch.inf).sum())
    before = model.weight.detach().clone()
    assert not updater.step().is_applied
    assert torch.equal(before, model.weight)
    assert updater.loss_scale == 2.0**15


def test_a_resumed_run_is_bit_equal_to_an_uninterrupted_one(folder, tmp_path):
    """RES-10 on the trainer's side: 2 steps, save, load, 2 steps against 4 steps."""

    def start():
        model = load.load_model(Model(path=str(folder), precision="no"), "cpu")
        return model, Updater(model, Optimizer(learning_rate=1e-2, lr_scheduler_type="cosine", warmup_steps=2), 9)

    def train(model, updater, seeds):
        for seed in seeds:
            updater.backward(_loss(model, seed))
            updater.step()

    whole, whole_updater = start()
    train(whole, whole_updater, [1, 2, 3, 4])
    first, first_updater = start()
    train(first, first_updater, [1, 2])
    path = checkpoint.folder_of(tmp_path, 2)
    checkpoint.save(path, first, first_updater, {})
    expected = torch.rand(3), np.random.rand(3)
    second, second_updater = start()
    checkpoint.load(checkpoint_folder.newest(tmp_path), second, second_updater)
    assert torch.equal(torch.rand(3), expected[0])
    assert np.array_equal(np.random.rand(3), expected[1])
    train(second, second_updater, [3, 4])
    assert second_updater.learning_rate == whole_updater.learning_rate
    for (name, tensor), (_, reference) in zip(full_tensors(second), full_tensors(whole), strict=True):
        assert torch.equal(tensor, reference), name


def test_optimizer_settings_changed_since_the_checkpoint_hold_and_moments_stay(folder, tmp_path, caplog):
    """Two of nine cosine steps at 1e-2 are done; going on at 3e-5 the rate is 3e-5 (1 + cos(2 pi / 9)) / 2."""

    def start(**settings):
        model = load.load_model(Model(path=str(folder), precision="no"), "cpu")
        return model, Updater(model, Optimizer(**{"learning_rate": 1e-2, "lr_scheduler_type": "cosine", **settings}), 9)

    first, first_updater = start()
    for seed in (1, 2):
        first_updater.backward(_loss(first, seed))
        first_updater.step()
    checkpoint.save(path := checkpoint.folder_of(tmp_path, 2), first, first_updater, {})
    second, second_updater = start(learning_rate=3e-5, weight_decay=0.1, adam_beta1=0.7)
    checkpoint.load(path, second, second_updater)
    assert second_updater.learning_rate == pytest.approx(3e-5 * (1 + np.cos(2 * np.pi / 9)) / 2, rel=1e-12)
    matrices, vectors = second_updater.optimizer.param_groups
    assert matrices["betas"] == vectors["betas"] == (0.7, 0.999) and (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert "optimizer.learning_rate=3e-05 (was 0.01)" in caplog.text and "lr_scheduler_type" not in caplog.text
    one, two = (next(iter(u.optimizer.state.values())) for u in (first_updater, second_updater))
    assert torch.equal(one["exp_avg"], two["exp_avg"]) and one["step"] == two["step"] == 2
    second_updater.backward(_loss(second, 3))
    assert second_updater.step().learning_rate < 3e-5


def test_checkpoint_folders(folder, tmp_path):
    model = load.load_model(Model(path=str(folder)), "cpu")
    updater = Updater(model, Optimizer(), None)
    assert checkpoint_folder.newest(tmp_path) is None
    for step in (3, 20, 100):
        checkpoint.save(checkpoint.folder_of(tmp_path, step), model, updater, {"trainer.json": {"step": step}})
    (tmp_path / ".step-000200" / "shards").mkdir(parents=True)  # killed while writing
    (tmp_path / "step-000300").mkdir()
    assert checkpoint_folder.newest(tmp_path).name == "step-000100"
    checkpoint.prune(tmp_path, 2)
    assert [p.name for p in checkpoint_folder.complete(tmp_path)] == ["step-000020", "step-000100"]
    checkpoint.save(checkpoint.folder_of(tmp_path, 101), model, None, {})
    assert checkpoint_folder.newest(tmp_path).name == "step-000100"
    with pytest.raises(ConfigError, match="save_only_model"):
        checkpoint.load(checkpoint.folder_of(tmp_path, 101), model, updater)
    with pytest.raises(ConfigError, match="is no checkpoint"):
        checkpoint.load(tmp_path / "step-000300", model, updater)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_export_in_bfloat16_loads_with_its_dtype_recorded(tmp_path, family):
    model = make_model(family)
    checkpoint.export(model, NoTokenizer(), tmp_path / "out", torch.bfloat16)
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    for (name, tensor), (_, reference) in zip(loaded.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(tensor, reference.bfloat16()), name
