"""The model and its cache: one forward per step over new prompts and running requests together."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from agrpo.errors import ConfigError
from agrpo.serve import attention, linear
from agrpo.serve.attention import PoolRead, PoolWrite, StepLayout
from agrpo.serve.cache import Cache, Pool
from agrpo.serve.linear import StateSpan
from agrpo.serve.lora import AdapterLayer
from agrpo.serve.request import Request

if TYPE_CHECKING:
    from transformers import PretrainedConfig

log = logging.getLogger(__name__)

_LAYER_TYPES = {"full_attention", "sliding_attention", linear.KIND}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_CPU_MEMORY_FRACTION = 0.25  # of free memory, for keys and values; the trainer runs beside the server
_CUDA_MEMORY_FRACTION = 0.8


def load_model(path: str, dtype: str | None, device: torch.device, **kwargs: object) -> torch.nn.Module:
    """Load a language model, or a vision-language one for text; ConfigError if it does not load, or cannot be served."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as IMAGES

    attention.register()
    try:
        config = AutoConfig.from_pretrained(path, **kwargs)
        _check_layers(config.get_text_config(), path)
        sees = (config.architectures or [""])[0] in IMAGES.values()
        model = (AutoModelForImageTextToText if sees else AutoModelForCausalLM).from_pretrained(
            path, dtype=dtype or "auto", attn_implementation=attention.NAME, **kwargs
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: the server cannot load {path}: {str(error).strip().splitlines()[0]}") from error
    kinds = list(getattr(config.get_text_config(), "layer_types", None) or [])
    if len(linear.linear_layers(model)) != kinds.count(linear.KIND):
        raise ConfigError(
            f"server: the embedded server cannot run {linear.KIND} layers of {config.model_type} ({path}); use server=vllm"
        )
    linear.bind(model)
    return model.to(device).eval().requires_grad_(False)


def _check_layers(config: PretrainedConfig, path: str) -> None:
    unknown = set(getattr(config, "layer_types", None) or ["full_attention"]) - _LAYER_TYPES
    if unknown:
        raise ConfigError(
            f"server: the embedded server cannot run layers of type {', '.join(sorted(unknown))} ({path}); use server=vllm"
        )


class Runner:
    """Places requests in the cache and turns a step's requests into next-token logits."""

    def __init__(self, model: torch.nn.Module, max_length: int, max_num_seqs: int, kv_cache_tokens: int | None):
        self.model, self.device, self.dtype = model, model.device, model.dtype
        config = model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, heads, head_size)
        token_bytes = 2 * shape[0] * shape[1] * shape[2] * self.dtype.itemsize
        affordable = _free_bytes(self.device) // token_bytes
        num_tokens = kv_cache_tokens or min(max_num_seqs * max_length, affordable)
        if num_tokens < max_length:
            raise ConfigError(
                f"server.kv_cache_tokens must be at least max_model_len = {max_length}, got {num_tokens}; "
                "lower server.max_model_len or free memory"
            )
        self.kv_heads = heads
        self.cache = Cache(num_tokens, max_length, shape, self.dtype, self.device)
        self.adapters = AdapterLayer(model)

    def forward(self, new: list[list[Request]]) -> tuple[list[Request], torch.Tensor]:
        """Run new requests, given as lists that share one context, and all other placed requests.

        Gives the requests and their logits [requests, V], in the same order.
        """
        fresh = {id(r) for siblings in new for r in siblings}
        tokens, positions, owners, last = [], [], [], []
        segments, writes, spans, states = [], {}, [], []
        for siblings in new:
            context = siblings[0].prompt_ids + siblings[0].output_ids
            start = len(tokens)
            tokens += context
            positions += range(len(context))
            segments.append((start, len(tokens)))
            last += [len(tokens) - 1] * len(siblings)
            owners += siblings
            spans.append((start, len(tokens), siblings[0].adapter))
            states.append(StateSpan(start, len(tokens), siblings, is_new=True))
            for request in siblings:
                writes.setdefault(id(request.pool), (request.pool, []))[1].append((request, start, len(context)))
        reads, pool_writes = [], [self._write_prompts(pool, items) for pool, items in writes.values()]
        for pool in self.cache.active:
            running = [r for r in pool.requests if id(r) not in fresh]
            if not running:
                continue
            start, lengths = len(tokens), [r.length - 1 for r in running]
            tokens += [r.output_ids[-1] for r in running]
            positions += lengths
            last += range(start, len(tokens))
            owners += running
            spans += [(start + i, start + i + 1, r.adapter) for i, r in enumerate(running) if r.adapter]
            states.append(StateSpan(start, len(tokens), running, is_new=False))
            reads.append(self._read(pool, start, lengths))
            pool_writes.append(self._write_running(pool, start, lengths))
        layout = StepLayout(segments, reads, pool_writes, states)
        self.adapters.select(spans, len(tokens))
        return owners, self._logits(tokens, positions, last, layout)

    def _logits(self, tokens: list[int], positions: list[int], last: list[int], layout: StepLayout) -> torch.Tensor:
        keep: int | torch.Tensor = 0  # 0 = every position
        distinct = sorted(set(last))
        if len(distinct) < len(tokens):
            keep = torch.tensor(distinct, device=self.device)
        output = self.model(
            input_ids=torch.tensor([tokens], device=self.device),
            position_ids=torch.tensor([positions], device=self.device),
            use_cache=False,
            logits_to_keep=keep,
            layout=layout,
        )
        logits = output.logits[0]
        if len(distinct) < len(last):
            row = {position: i for i, position in enumerate(distinct)}
            logits = logits[torch.tensor([row[p] for p in last], device=self.device)]
        return logits

    def _read(self, pool: Pool, start: int, lengths: list[int]) -> PoolRead:
        width = max(lengths) + 1
        positions = torch.tensor(lengths, device=self.device)
        mask = torch.zeros((len(lengths), 1, width), device=self.device)
        mask.masked_fill_(torch.arange(width, device=self.device) > positions[:, None, None], -torch.inf)
        return PoolRead(pool, start, len(lengths), width, mask, positions)

    def _write_running(self, pool: Pool, start: int, lengths: list[int]) -> PoolWrite:
        rows = np.arange(len(lengths) * self.kv_heads).reshape(len(lengths), self.kv_heads) * pool.capacity
        target = (rows + np.array(lengths)[:, None]).reshape(-1)
        return PoolWrite(pool, None, start, torch.from_numpy(target).to(self.device))

    def _write_prompts(self, pool: Pool, items: list[tuple[Request, int, int]]) -> PoolWrite:
        sources, targets = [], []
        for request, start, length in items:
            offsets = np.arange(length)
            sources.append(start + offsets)
            rows = (request.slot * self.kv_heads + np.arange(self.kv_heads)) * pool.capacity
            targets.append((offsets[:, None] + rows).reshape(-1))
        source, target = np.concatenate(sources), np.concatenate(targets)
        return PoolWrite(pool, torch.from_numpy(source).to(self.device), 0, torch.from_numpy(target).to(self.device))


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * _CUDA_MEMORY_FRACTION)
    import psutil

    return int(psutil.virtual_memory().available * _CPU_MEMORY_FRACTION)


def load_tokenizer(path: str, **kwargs: object):
    """The tokenizer of the folder, or None where there is none: requests then carry token ids only."""
    from transformers import AutoTokenizer

    folder = Path(path)
    if folder.is_dir() and not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        # transformers makes an empty tokenizer here, whose EOS id 0 is a word of the model
        log.info("no tokenizer in %s; prompts must be token ids", path)
        return None
    return AutoTokenizer.from_pretrained(path, **kwargs)


def stop_ids(model: torch.nn.Module, tokenizer) -> frozenset[int]:
    """Every id that ends a turn: the generation config's and the tokenizer's (GEN-10)."""
    generation = getattr(model, "generation_config", None)
    ids = generation.eos_token_id if generation is not None else model.config.get_text_config().eos_token_id
    ids = [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    return frozenset(ids)


def max_length(model: torch.nn.Module, limit: int | None) -> int:
    """Longest context: `limit`, or what the model was made for, at most 4096."""
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(r for r in rope.values() if isinstance(r, dict))]  # of the model, or of each kind of layer
    # Beyond the original context the frequencies of longrope would change with what else is in a forward.
    originals = [r["original_max_position_embeddings"] for r in kinds if r.get("rope_type") == "longrope"]
    longest = min(originals, default=getattr(config, "max_position_embeddings", None) or 4096)
    if limit is not None and limit > longest:
        raise ConfigError(
            f"server.max_model_len must be at most {longest}, the context of the model's rotary embeddings, got {limit}"
        )
    return limit or min(longest, 4096)
