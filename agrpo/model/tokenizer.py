"""The tokenizer of the `model` section, for processes that need no model: nothing here imports PyTorch's parts for training."""

from __future__ import annotations

from typing import Any

import transformers

from agrpo.errors import ConfigError


def load_tokenizer(section: Any) -> Any:
    """The tokenizer, padding on the left, with EOS where it has no pad token; raises ConfigError without EOS."""
    path = section.tokenizer_path or section.path
    kwargs = place(section) if section.tokenizer_path is None else {}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, padding_side="left", **source(section), **kwargs)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"model.tokenizer_path: {path} cannot be loaded: {first_line(error)}") from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"model.tokenizer_path: the tokenizer of {path} has no EOS token, so no answer would ever end"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def source(section: Any) -> dict[str, Any]:
    """What loading a configuration, a tokenizer or a model takes from the section alike."""
    return {"trust_remote_code": True} if section.trust_remote_code else {}


def place(section: Any) -> dict[str, Any]:
    """Where in `model.path` the files are: of `model.init_kwargs`, what a configuration and a tokenizer take too."""
    return {k: section.init_kwargs[k] for k in ("revision", "gguf_file", "subfolder") if k in section.init_kwargs}


def first_line(error: BaseException) -> str:
    """The first line of an error with text in it; its type where there is none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
