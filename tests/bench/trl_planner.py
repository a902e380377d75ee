"""TRL's planner and packer over the samples of a file; prints its processor seconds. Run where TRL is."""

import json
import sys
import time
import warnings

import numpy as np
import torch

warnings.simplefilter("ignore")
from trl.experimental.async_grpo.async_grpo_trainer import TokenBudgetBatcher  # noqa: E402

torch.set_num_threads(1)
arrays = np.load(sys.argv[1])
samples = [
    {
        "input_ids": torch.from_numpy(tokens).long(),
        "completion_mask": torch.from_numpy(mask).long(),
        "old_log_probs": torch.from_numpy(logprobs),
        "advantage": 1.0,
        "group_id": int(group),
        "metrics": {},
    }
    for tokens, mask, logprobs, group in zip(
        arrays["token_ids"], arrays["loss_mask"], arrays["sampler_logprobs"], arrays["group_ids"], strict=True
    )
]
began, count = time.process_time(), 0
for rows in TokenBudgetBatcher(samples, 4, 65_536, {}):
    packed = [row.pack() for row in rows]
    count += 1
print(json.dumps({"seconds": time.process_time() - began, "microbatches": count}))
