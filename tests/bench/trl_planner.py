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
# A microbatch comes only when a sample no longer fits: this one fits nowhere but in an empty row.
last = {**samples[0], "input_ids": torch.full((65_536,), -1), "group_id": -1}
began, num_placed, count = time.process_time(), 0, 0
for rows in TokenBudgetBatcher([*samples, last], 4, 65_536, {}):
    packed = [row.pack() for row in rows if row.samples]
    num_placed, count = num_placed + sum(len(row.samples) for row in rows), count + 1
    if num_placed == len(samples):
        break
print(json.dumps({"seconds": time.process_time() - began, "microbatches": count}))
