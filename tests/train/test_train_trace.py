"""The log-probs of what was trained are read from the device after the update only."""

from types import SimpleNamespace

import numpy as np
import torch

from agrpo.train.trace import Trace


def test_nothing_is_read_from_the_device_until_the_rows_are_written(tmp_path):
    row = SimpleNamespace(
        predicting_index=np.array([4, 3]), sample_index=np.array([0, 0]), group_ids=np.array([7]),
        rollout_indices=np.array([0]), target_ids=np.array([11, 5], np.int32),
    )  # fmt: skip
    trace, written = Trace(tmp_path, 0), tmp_path / "trained" / "rank-0.jsonl"
    # A tensor without storage: any reading of it is an error.
    trace.add(row, SimpleNamespace(trainer_logprobs=torch.zeros(2, device="meta")))
    trace = Trace(tmp_path, 0)
    for _ in range(2):
        trace.add(row, SimpleNamespace(trainer_logprobs=torch.tensor([-0.75, -0.25])))
    assert written.read_text() == ""
    trace.write(3)
    trace.write(5)
    lines = written.read_text().splitlines()
    assert len(lines) == 2 and lines[0] == lines[1]
    assert '"step": 3' in lines[0] and '"trainer_logprobs": [-0.25, -0.75]' in lines[0]
