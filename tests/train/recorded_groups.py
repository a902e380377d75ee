"""Groups of samples as a rollout process would send them: random tokens, log-probs and advantages from a seed."""

import numpy as np

from agrpo.types import ReadyGroup, Sample

G, K, VOCABULARY = 7, 3, 59


def recorded_group(rng: np.random.Generator, group_id: int, size: tuple[int, int] | None = None) -> ReadyGroup:
    """Seven answers to one prompt; `size`: tokens of the prompt and of each answer, where they may not differ."""
    prompt = rng.integers(5, VOCABULARY, size[0] if size else rng.integers(3, 11))
    samples = []
    for slot in range(G):
        length = size[1] if size else int(rng.integers(2, 13))
        ids = np.concatenate([prompt, rng.integers(5, VOCABULARY, length)]).astype(np.int32)
        mask = np.arange(len(ids)) >= len(prompt)
        samples.append(
            Sample(
                token_ids=ids,
                loss_mask=mask,
                sampler_logprobs=np.where(mask, -4.0 + 0.3 * rng.normal(size=len(ids)), 0).astype(np.float32),
                versions=np.where(mask, 1, -1).astype(np.int32),
                advantage=float(rng.normal()),
                head_ids=np.stack([rng.permutation(VOCABULARY)[:K] for _ in range(length)]).astype(np.int32),
                head_logprobs=np.log(rng.dirichlet([1.0] * (K + 1), length)[:, :K]).astype(np.float32),
                candidates=None,
                group_id=group_id,
                rollout_index=slot,
            )
        )
    slots = np.arange(G, dtype=np.int32)
    return ReadyGroup(group_id, group_id, 0, tuple(samples), rng.normal(size=G), {}, slots, 1, 0.0)
