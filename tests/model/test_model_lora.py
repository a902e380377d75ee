"""LoRA: what is trained, equal to the merged model packed and alone, and files that PEFT and transformers load."""

from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from model_build import group, make_model, make_row, make_sample, sequence_packed
from model_rank import NoTokenizer, section_of, steps_of_rows
from test_model_packed import TEMPERATURE, _alone
from test_model_ranks import OPTIMIZER, _folder, _run_ranks, _same
from test_model_vlm import CONFIGS

from agrpo.errors import ConfigError
from agrpo.loss.score_centering import ScoreCentering
from agrpo.model import attention, checkpoint
from agrpo.model.adapter import adapter_config, merged_only_reason
from agrpo.model.load import load_model, prepare
from agrpo.model.optim import Updater
from agrpo.model.shard import shard
from agrpo.model.terms import DeviceRow, token_logprobs, token_terms
from agrpo.model.weights import adapter_tensors, checkpoint_names, full_tensors, plain_tensors
from agrpo.sections import Lora, Model

SECTION = Model(path="tiny", precision="no", lora=Lora(enabled=True, r=3, alpha=5.0))


def adapted(family: str, **lora) -> torch.nn.Module:
    """A model whose adapter is not zero."""
    torch.manual_seed(5)
    model = prepare(make_model(family), replace(SECTION, lora=replace(SECTION.lora, **lora)))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model


def merged_twin(model: torch.nn.Module, family: str) -> torch.nn.Module:
    """transformers' own model with the weights that would be sent, experts still together."""
    twin = make_model(family, "eager")
    found = twin.load_state_dict(dict(plain_tensors(model)), strict=False)
    tied = {"lm_head.weight"} if twin.config.tie_word_embeddings else set()
    assert not found.unexpected_keys and set(found.missing_keys) <= tied
    return twin


def logprobs_of(model: torch.nn.Module, tokens) -> torch.Tensor:
    """By transformers' forward of one sequence."""
    ids = torch.as_tensor(tokens, dtype=torch.long)[None]
    with torch.no_grad():
        logits = model(ids).logits[0, :-1].log_softmax(-1)
    return logits.gather(1, ids[0, 1:, None]).squeeze(1)


KINDS = {
    "plain": {},
    "some": {"target_modules": ["q_proj", "down_proj"], "options": {"use_rslora": True}},
    "dora": {"options": {"use_dora": True}},
    "saved": {"options": {"modules_to_save": ["norm"], "rank_pattern": {"q_proj": 2}}},
}


@pytest.mark.parametrize(
    "family, kind",
    [
        *((family, "plain") for family in ("qwen3", "llama", "gemma2", "gemma3", "qwen3_5", "qwen3_moe", "qwen3_next")),
        *(("qwen3", k) for k in KINDS if k != "plain"),
    ],
)
def test_packed_with_the_adapter_equals_each_sample_alone_with_merged_weights(family, kind):
    model = adapted(family, **KINDS[kind])
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    twin, samples = merged_twin(model, family), group(1, [7, 11, 13])
    assert checkpoint_names(model) == [n for n, _ in full_tensors(model)]
    row = make_row(samples)
    terms = token_terms(model, DeviceRow.of(row, "cpu"), 1.0, want_head=False)
    for index, rollout_index in enumerate(row.rollout_indices):
        sample = samples[rollout_index]
        alone = logprobs_of(twin, sample.token_ids)[-int(sample.loss_mask.sum()) :]
        packed = terms.trainer_logprobs[torch.from_numpy(row.sample_index == index)]
        torch.testing.assert_close(packed, alone, rtol=0, atol=1e-5)
    # The weights that training continues with are the very bits of before (SYNC-8).
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    plain = make_model(family, "eager")
    assert float((logprobs_of(plain, samples[0].token_ids) - logprobs_of(twin, samples[0].token_ids)).abs().max()) > 1e-3


def test_experts_get_no_adapter():
    names = {n.rpartition(".lora_")[0] for n, p in adapted("qwen3_next").named_parameters() if p.requires_grad}
    assert any("linear_attn.in_proj_qkvz" in n for n in names) and any("q_proj" in n for n in names)
    assert not any("expert" in n and "shared_expert_gate" not in n for n in names)
    with pytest.raises(ConfigError, match="target_modules must leave experts and routers alone"):
        adapted("qwen3_moe", target_modules=["gate_proj", "up_proj", "down_proj"])


def test_only_the_adapter_is_trained_and_its_gradient_is_that_of_the_merged_weights():
    """dB = s dW A^T and dA = s B^T dW, with dW from a model that trains every weight."""
    model = adapted("qwen3")
    twin = prepare(make_model("qwen3"), replace(SECTION, lora=Lora()))
    twin.load_state_dict(dict(full_tensors(model)))
    row = DeviceRow.of(make_row(group(2, [5, 9])), "cpu")
    for each in (model, twin):
        ScoreCentering()(token_terms(each, row, 0.7, want_head=True)).sum().backward()
    grads, weights = dict(twin.named_parameters()), dict(model.named_parameters())
    trained = {n for n, p in weights.items() if p.requires_grad}
    assert trained and all(".lora_" in n for n in trained)
    assert all((p.grad is None) == (n not in trained) for n, p in weights.items())
    for name in (n for n in trained if "lora_A" in n):
        of_b = name.replace("lora_A", "lora_B")
        dw = grads[name.replace("lora_A.default.weight", "weight")].grad
        a, b = weights[name], weights[of_b]
        torch.testing.assert_close(weights[of_b].grad, 5 / 3 * dw @ a.T, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(a.grad, 5 / 3 * b.T @ dw, rtol=1e-3, atol=1e-5)


def test_a_new_adapter_changes_nothing_and_leaves_bfloat16_weights_small():
    model = prepare(make_model("qwen3", dtype=torch.bfloat16), replace(SECTION, precision="bf16"))
    shard(model, replace(SECTION, precision="bf16"), None)
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    tokens = group(3, [6])[0].token_ids
    plain = prepare(make_model("qwen3", dtype=torch.bfloat16), replace(SECTION, precision="bf16", lora=Lora()))
    assert abs(token_logprobs(model, tokens, 1.0, "cpu") - token_logprobs(plain, tokens, 1.0, "cpu")).max() < 0.05
    loss = ScoreCentering()(token_terms(model, DeviceRow.of(make_row(group(3, [6])), "cpu"), 1.0, want_head=True)).sum()
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    "family, lora, text",
    [
        ("qwen3", {"target_modules": ["q_proj", "lm_head"]}, "lm_head"),
        ("qwen3", {"target_modules": ".*head"}, "lm_head"),
        ("qwen3", {"options": {"modules_to_save": ["lm_head"]}}, "lm_head"),
        ("llama", {"target_modules": ["embed_tokens"]}, "embeddings"),
        ("qwen3", {"target_modules": ["nothing"]}, "nothing"),
        ("qwen3", {"options": {"rank": 3}}, "rank"),
    ],
)
def test_what_cannot_be_adapted_is_refused_in_one_line(family, lora, text):
    with pytest.raises(ConfigError, match=text) as caught:
        adapted(family, **lora)
    assert len(caught.value.problems) == 1 and "\n" not in str(caught.value)


def test_adapters_that_servers_cannot_load_are_named():
    assert merged_only_reason(adapted("qwen3"), SECTION.lora) is None
    assert "embedding" in merged_only_reason(adapted("qwen3", target_modules=["embed_tokens", "q_proj"]), SECTION.lora)
    for options in ({"use_dora": True}, {"bias": "all"}, {"modules_to_save": ["norm"]}):
        assert next(iter(options)) in replace(SECTION.lora, options=options).merged_only


def test_two_ranks_equal_no_sharding(tmp_path):
    folder = _folder(tmp_path, "qwen3", "no")
    (folder / "lora").touch()
    two = _run_ranks(folder, 2)
    assert two["bfloat16"]["dtypes"] == [("torch.bfloat16", False), ("torch.float32", True)]
    assert 0 < two["bfloat16"]["norm"] < float("inf")
    torch.manual_seed(11)
    section = section_of(folder, fsdp=Model(path="").fsdp)
    model = load_model(section, "cpu")
    shard(model, section, None)
    updater, losses = Updater(model, OPTIMIZER, None), []
    for rows in steps_of_rows():
        total, losses = sum(r.num_trained_tokens for r in rows), [*losses, 0.0]
        for row in rows:
            loss = ScoreCentering()(token_terms(model, DeviceRow.of(row, "cpu"), 0.7, want_head=True)).sum() / total
            updater.backward(loss)
            losses[-1] += loss.item()
        updater.step()
    assert two["losses"] == pytest.approx(losses, rel=1e-4)
    _same(two["weights"], dict(full_tensors(model)), 1e-4)
    exported = transformers.AutoModelForCausalLM.from_pretrained(folder / "exported2")
    _same({n: t.detach() for n, t in exported.named_parameters()}, dict(full_tensors(model)), 1e-4)
    # A checkpoint of two ranks goes on on one, with the same adapter.
    again = load_model(section, "cpu")
    checkpoint.load(folder / "checkpoints2" / "step-000002", again, Updater(again, OPTIMIZER, None))
    _same(dict(adapter_tensors(again)), dict(adapter_tensors(model)), 1e-4)


def step(model, updater):
    row = DeviceRow.of(make_row(group(5, [7, 6])), "cpu")
    updater.backward(ScoreCentering()(token_terms(model, row, 1.0, want_head=True)).sum())
    updater.step()


def test_peft_loads_what_is_saved_and_a_resumed_run_goes_on_exactly(tmp_path):
    peft = pytest.importorskip("peft")
    make_model("qwen3", "eager").save_pretrained(tmp_path / "base")
    section = replace(SECTION, path=str(tmp_path / "base"))
    model = load_model(section, "cpu")
    shard(model, section, None)
    updater = Updater(model, OPTIMIZER, None)

    step(model, updater)
    folder = tmp_path / "run" / "checkpoints" / "step-000001"
    checkpoint.save(folder, model, updater, {})
    checkpoint.export(model, NoTokenizer(), tmp_path / "run" / "model", None)
    tokens = make_sample([7, 9, 4, 30, 12, 8], 2).token_ids
    expected = token_logprobs(model, tokens, 1.0, "cpu")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    for saved in (folder / "adapter", tmp_path / "run" / "adapter"):
        loaded = peft.PeftModel.from_pretrained(base, saved)
        assert logprobs_of(loaded, tokens).numpy() == pytest.approx(expected, abs=1e-5)
        base = loaded.unload()
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert logprobs_of(merged, tokens).numpy() == pytest.approx(expected, abs=1e-5)
    # The checkpoint holds the adapter and not the base model, except buffers.
    held = {k.removeprefix("model.") for k in dcp.FileSystemReader(folder / "shards").read_metadata().state_dict_metadata}
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    assert not held & frozen and {n for n, p in model.named_parameters() if p.requires_grad} <= held

    resumed = load_model(section, "cpu")
    shard(resumed, section, None)
    second = Updater(resumed, OPTIMIZER, None)
    checkpoint.load(folder, resumed, second)
    for each in ((model, updater), (resumed, second)):
        step(*each)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True))
    other = load_model(replace(section, lora=replace(section.lora, r=2)), "cpu")
    with pytest.raises(ConfigError, match="model.lora.r=3"):
        checkpoint.load(folder, other, Updater(other, OPTIMIZER, None))
    plain = load_model(replace(section, lora=Lora()), "cpu")
    with pytest.raises(ConfigError, match="model.lora.enabled=true"):
        checkpoint.load(folder, plain, Updater(plain, OPTIMIZER, None))
    assert adapter_config(model)["base_model_name_or_path"] == section.path


def test_dropout_goes_on_exactly_after_a_resume(tmp_path):
    """What is dropped is drawn: the checkpoint's random state decides, and without it the weights would be others."""
    make_model("qwen3", "eager").save_pretrained(tmp_path / "base")
    section = replace(SECTION, path=str(tmp_path / "base"), lora=replace(SECTION.lora, dropout=0.3))

    def start():
        model = load_model(section, "cpu").train()
        shard(model, section, None)
        return model, Updater(model, OPTIMIZER, None)

    def resumed(seed=None):
        again = start()
        checkpoint.load(folder, *again)
        if seed is not None:
            torch.manual_seed(seed)
        step(*again)
        step(*again)
        return list(again[0].parameters())

    model, updater = start()
    step(model, updater)
    checkpoint.save(folder := tmp_path / "step-000001", model, updater, {})
    step(model, updater)
    step(model, updater)
    assert all(map(torch.equal, model.parameters(), resumed()))
    assert not all(map(torch.equal, model.parameters(), resumed(seed=7)))


def test_image_parts_get_no_adapter_and_are_not_sent():
    shape = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    text = dict(**shape, vocab_size=61, num_key_value_heads=1, head_dim=4, layer_types=["full_attention"])
    config = transformers.Gemma3Config(
        text_config=text, vision_config=dict(**shape, image_size=28, patch_size=14), mm_tokens_per_image=4
    )
    plain = transformers.Gemma3ForConditionalGeneration(config)
    expected = checkpoint_names(prepare(plain, replace(SECTION, lora=Lora())))
    model = prepare(transformers.Gemma3ForConditionalGeneration(config), SECTION)
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert trained and all(n.startswith("model.language_model.") for n in trained)
    assert checkpoint_names(model) == expected == [n for n, _ in full_tensors(model)]


@pytest.mark.parametrize("family", ["gemma3", "qwen3_vl", "qwen3_5"])
def test_the_text_of_an_image_model_with_the_adapter_equals_each_sample_alone_with_merged_weights(family):
    attention.register()
    torch.manual_seed(7)
    config = CONFIGS[family]()
    plain = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    model = transformers.AutoModelForImageTextToText.from_config(CONFIGS[family](), attn_implementation=attention.NAME)
    model.load_state_dict(plain.state_dict())
    model, samples = prepare(model, SECTION), group(1, [7, 11, 13])
    before = torch.cat([_alone(plain, s)[0] for s in samples]).detach()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape) * 0.1)
    assert not plain.load_state_dict(dict(plain_tensors(model)), strict=False).unexpected_keys
    merged = torch.cat([_alone(plain, s)[0] for s in samples]).detach()
    for row in (make_row(samples), sequence_packed(samples)):
        packed = token_terms(model, DeviceRow.of(row, "cpu"), TEMPERATURE, want_head=False).trainer_logprobs
        torch.testing.assert_close(packed, merged, rtol=0, atol=1e-5)
    assert float((merged - before).abs().max()) > 1e-3
