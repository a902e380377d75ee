"""One way of computing the head, forward and backward in a process of its own: `python head_child.py KIND TERMS`.

Prints {"cpu_s", "extra_bytes"}: processor seconds of one thread, and the highest memory above inputs and gradients. Those
of hidden states and weight are what every head takes and gives, so they are not counted; their being written late
is allowed for by touching as much memory beforehand.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from tests.memory import status_bytes

HIDDEN, VOCABULARY, HEADS = 1024, 151_936, 8


def inputs(terms: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Hidden [M, H] and weight [V, H] as leaves, with logits of about 1 in size, targets [M] and head ids [M, K]."""
    torch.manual_seed(0)
    hidden, weight = torch.empty(terms, HIDDEN).normal_(), torch.empty(VOCABULARY, HIDDEN).normal_(std=HIDDEN**-0.5)
    targets, heads = torch.randint(VOCABULARY, (terms,)), torch.randint(VOCABULARY, (terms, HEADS))
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets, heads


def plain(hidden, weight, targets, heads) -> tuple[torch.Tensor, ...]:
    """The same three outputs from logits that are kept."""
    logprobs = torch.log_softmax(hidden @ weight.T, -1)
    entropy = -logprobs.detach().exp().mul_(logprobs.detach()).sum(-1)
    return logprobs.gather(1, targets[:, None]).squeeze(1), logprobs.gather(1, heads), entropy


def fused(hidden, weight, targets, heads) -> tuple[torch.Tensor, ...]:
    from agrpo.model.head import head_terms
    from agrpo.model.head_torch import Scaling

    return head_terms(hidden, weight, None, targets, heads, Scaling(), None)


def trl(hidden, weight, targets, heads) -> tuple[torch.Tensor, ...]:
    """Log-probs and entropy: there are no head ids in it."""
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as chunk

    logprobs, entropy, *_ = ChunkedLogProbFunction.apply(
        hidden, weight, None, targets, 1.0, chunk, None, 1.0, ("entropy",)
    )
    return logprobs, logprobs.new_zeros(len(logprobs), 0), entropy.detach()


def total(logprobs, head_logprobs, entropy) -> torch.Tensor:
    """A sum that weighs every log-prob differently."""
    of_targets, of_heads = weighed(*head_logprobs.shape, logprobs.dtype, logprobs.device)
    return (of_targets * logprobs).sum() + (of_heads * head_logprobs).sum()


def weighed(terms: int, heads: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """What every log-prob [terms] and every one of head ids [terms, heads] counts in `total`."""
    like = {"dtype": dtype, "device": device}
    return torch.linspace(1, -2, terms, **like), torch.linspace(-1, 1.5, terms * heads, **like).view(terms, heads)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def main(kind: str, terms: int) -> None:
    torch.set_num_threads(1)
    head = {"plain": plain, "fused": fused, "fused without heads": fused, "trl": trl}[kind]
    hidden, weight, targets, heads = inputs(terms)
    if kind == "fused without heads":
        heads = heads[:, :0]
    small = (
        hidden[:8].detach().requires_grad_(),
        weight[:999].detach().requires_grad_(),
        targets[:8] % 999,
        heads[:8] % 999,
    )
    total(*head(*small)).backward()  # imports, thread pools
    before, started = _resident(), time.process_time()
    total(*head(hidden, weight, targets, heads)).backward()
    cpu_s = time.process_time() - started
    gradients = sum(x.grad.numel() * x.grad.element_size() for x in (hidden, weight))
    print(json.dumps({"cpu_s": cpu_s, "extra_bytes": status_bytes("VmHWM") - before - gradients}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
