"""What a rank looks up before it trains: the server's model, a prompt for the proof of arrival, seeds."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from agrpo.errors import ConfigError
from agrpo.sync.control import ServerControl


def seed_all(seed: int, full_determinism: bool) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if full_determinism:
        torch.use_deterministic_algorithms(True)


def served_model(server: ServerControl) -> dict[str, Any]:
    """Id and context length of the base model at the first server (SRV-10)."""
    entries = server.request(server.urls[0], "GET", "/v1/models")["data"]
    base = next(entry for entry in entries if not entry.get("parent"))
    if not base.get("max_model_len"):
        raise ConfigError(f"{server.urls[0]}/v1/models does not say max_model_len; set packer.token_budget")
    return base


def probe_ids(tokenizer: Any) -> list[int]:
    """A fixed short prompt for the proof of arrival."""
    ids = tokenizer("What is 17 + 25? Weights, arrive.", add_special_tokens=False)["input_ids"]
    return list(ids) or [tokenizer.eos_token_id]
