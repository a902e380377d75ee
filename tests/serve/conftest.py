"""Real servers on loopback over tiny random models, and the plain forward that their answers are held to."""

from __future__ import annotations

import pytest
import torch
from serving import make_model

from agrpo.serve.embedded import EmbeddedServer


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Three models: a Qwen3 with tied embeddings, another of the same shape, and a Llama with a head of its own."""
    root = tmp_path_factory.mktemp("models")
    made = {"qwen3": ("qwen3", 1), "other": ("qwen3", 2), "llama": ("llama", 3)}
    return {name: make_model(root / name, kind, seed) for name, (kind, seed) in made.items()}


@pytest.fixture(scope="session")
def plain(folders):
    """plain(name, token_ids) -> [L, V] float32 logits of an ordinary forward."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    models = {}

    def forward(name: str, token_ids: list[int]) -> torch.Tensor:
        if name not in models:
            folder = folders.get(name, name)
            sees = hasattr(AutoConfig.from_pretrained(folder), "vision_config")
            kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
            models[name] = kind.from_pretrained(folder, attn_implementation="eager").eval()
        with torch.no_grad():
            return models[name](torch.tensor([token_ids])).logits[0]

    forward.models = models
    return forward


@pytest.fixture(scope="module")
def qwen(folders):
    with EmbeddedServer(folders["qwen3"], model_name="tiny") as server:
        yield server


@pytest.fixture
def fresh(folders):
    """A server whose weights and adapters a test may change."""
    with EmbeddedServer(folders["qwen3"], receiver="folder_receiver.FolderReceiver") as server:
        yield server
