"""Small stand-ins for a hub's model and data set, for runs that replace them through overrides only."""

from __future__ import annotations

import json
from pathlib import Path

QUICKSTART = Path(__file__).resolve().parents[1] / "recipes" / "quickstart" / "model"
PROBLEMS = (
    ("Evaluate $\\int_0^1 x\\,dx$.", "$\\frac{1}{2}$"),
    ("Find the limit of $\\sin(x)/x$ as $x$ goes to $0$.", "1"),
    ("What is the order of the group $S_3$?", "6"),
    ("Compute $7^2 - 5$.", "44"),
    ("Solve $x^2 = 9$ for $x > 0$.", "3"),
)


def tiny_qwen3(path: Path, seed: int = 0, num_layers: int = 2, tied: bool = False) -> Path:
    """A Qwen3 model folder of random weights with the quickstart's tokenizer: 77k parameters, any text goes through."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=num_layers,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=32,  # the smallest that vLLM's CPU build can attend with
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return Path(path)


def tiny_qwen3_5(path: Path, seed: int = 0) -> Path:
    """A Qwen3.5 checkpoint, vision tower included: text layers of both kinds, with the quickstart's tokenizer."""
    import torch
    from transformers import AutoTokenizer, Qwen3_5Config, Qwen3_5ForConditionalGeneration

    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART)
    text = dict(
        vocab_size=len(tokenizer), hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=512, linear_key_head_dim=16,
        linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4,
        layer_types=["linear_attention", "full_attention"], bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25,
                         "mrope_section": [2, 1, 1]},
    )  # fmt: skip
    vision = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, patch_size=4, out_hidden_size=48,
                  num_position_embeddings=16)  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision))
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return Path(path)


def tiny_dataset(path: Path, num_rows: int = 35) -> Path:
    """A JSONL file with the columns of DeepMath-103K: `prompt` (messages) and `solution`."""
    with Path(path).open("w") as file:
        for i in range(num_rows):
            question, solution = PROBLEMS[i % len(PROBLEMS)]
            text = f"Problem {i}. {question}"
            file.write(json.dumps({"prompt": [{"role": "user", "content": text}], "solution": solution}) + "\n")
    return Path(path)
