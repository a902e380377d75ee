"""The load of one server or several, from their Prometheus text (CONC-3, CONC-12)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_SAMPLE = re.compile(r"^(vllm:\w+)(?:\{(.*)\})?\s+(\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """One poll over all engines of all servers."""

    kv_cache_usage: float  # 0..1, maximum over engines
    num_running: float  # requests, sum
    num_waiting: float  # requests, sum
    num_preemptions: float  # counter since the servers started, sum
    kv_cache_tokens: int | None  # capacity, sum; None where no server publishes it
    paused: bool = False  # a weight sync holds at least one server


def load_of(texts: Iterable[str], paused: bool = False) -> ServerLoad:
    """Reduce the metrics pages of all servers: usage is a maximum, the rest are sums."""
    usage, running, waiting, preemptions, tokens = 0.0, 0.0, 0.0, 0.0, 0
    for text in texts:
        for name, labels, value in _SAMPLE.findall(text):
            if name == "vllm:kv_cache_usage_perc":
                usage = max(usage, float(value))
            elif name == "vllm:num_requests_running":
                running += float(value)
            elif name == "vllm:num_requests_waiting":
                waiting += float(value)
            elif name == "vllm:num_preemptions_total":
                preemptions += float(value)
            elif name == "vllm:cache_config_info":
                tokens += _cache_tokens(dict(_LABEL.findall(labels)))
    return ServerLoad(usage, running, waiting, preemptions, tokens or None, paused)


def _cache_tokens(labels: dict[str, str]) -> int:
    # On hybrid models the published token size is not blocks times block size, so it is preferred.
    explicit = labels.get("kv_cache_size_tokens", "")
    if explicit.isdigit():
        return int(explicit)
    blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
    return int(blocks) * int(size) if blocks.isdigit() and size.isdigit() else 0
