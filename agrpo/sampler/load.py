"""The load of one server or several, from their Prometheus text (CONC-3, CONC-12)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_SAMPLE = re.compile(r"^(vllm:\w+)(?:\{(.*)\})?\s+(\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """One poll over all engines of all servers."""

    kv_cache_usage: float  # 0..1, maximum over engines
    num_running: float  # requests, sum
    num_waiting: float  # requests, sum
    num_preemptions: dict[str, float]  # per address: counter since that server started, sum over its engines
    kv_cache_tokens: int | None  # capacity, sum; None where no server publishes it
    paused: bool = False  # a weight sync holds at least one server


def load_of(pages: Mapping[str, str], paused: bool = False) -> ServerLoad:
    """Reduce the metrics pages of all servers, by address: usage is a maximum, the rest are sums."""
    usage, running, waiting, tokens = 0.0, 0.0, 0.0, 0
    preemptions = dict.fromkeys(pages, 0.0)
    for url, text in pages.items():
        for name, labels, value in _SAMPLE.findall(text):
            if name == "vllm:kv_cache_usage_perc":
                usage = max(usage, float(value))
            elif name == "vllm:num_requests_running":
                running += float(value)
            elif name == "vllm:num_requests_waiting":
                waiting += float(value)
            elif name == "vllm:num_preemptions_total":
                preemptions[url] += float(value)
            elif name == "vllm:cache_config_info":
                tokens += _cache_tokens(dict(_LABEL.findall(labels)))
    return ServerLoad(usage, running, waiting, preemptions, tokens or None, paused)


def num_engines(text: str) -> int:
    """Data-parallel engines that one server's metrics page lists; 1 where it lists none."""
    samples = (s for s in _SAMPLE.findall(text) if s[0] == "vllm:kv_cache_usage_perc")
    return max(1, len({dict(_LABEL.findall(labels)).get("engine") for _, labels, _ in samples}))


def _cache_tokens(labels: dict[str, str]) -> int:
    # On hybrid models the published token size is not blocks times block size, so it is preferred.
    explicit = labels.get("kv_cache_size_tokens", "")
    if explicit.isdigit():
        return int(explicit)
    blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
    return int(blocks) * int(size) if blocks.isdigit() and size.isdigit() else 0
