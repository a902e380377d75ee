"""How the devices of a run should be divided between generation and training, from what its steps measured.

With G device-seconds of generation and R of training per step, n_g + n_t devices take max(G/n_g, R/n_t) plus the sync;
no split is faster than (G + R)/(n_g + n_t) plus the sync. With `rollout.max_staleness=0` each side waits for the other:
G/n_g + R/n_t plus the sync, and by Cauchy and Schwarz at least (sqrt(G) + sqrt(R))^2/(n_g + n_t).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from agrpo.metrics.history import History


@dataclass(frozen=True, slots=True)
class Split:
    """Seconds per step. `generation_s` and `training_s` are what each side is busy for with its devices of now."""

    generation_s: float
    training_s: float
    sync_s: float
    num_generation: int  # 0 where servers that the run did not start generate: their devices are not known
    num_training: int
    server_size: int = 1  # devices that one copy of the served model takes
    overlaps: bool = True  # both sides work at the same time

    def expected_s(self, num_generation: int, num_training: int) -> float:
        """The step time of another split, each side scaling with its devices.

        10 s on one device and 2 s on one device: 5 s of them on two and one, plus the sync.
        """
        generation = self.generation_s * self.num_generation / num_generation
        training = self.training_s * self.num_training / num_training
        return (max(generation, training) if self.overlaps else generation + training) + self.sync_s

    @property
    def num_devices(self) -> int:
        return self.num_generation + self.num_training

    @property
    def bound_s(self) -> float:
        """What freely divisible devices would reach."""
        generation, training = self.generation_s * self.num_generation, self.training_s * self.num_training
        work = generation + training if self.overlaps else (math.sqrt(generation) + math.sqrt(training)) ** 2
        return work / self.num_devices + self.sync_s

    def best(self) -> tuple[int, int]:
        """(devices of generation, of training) with the shortest step; the split of now where none is shorter."""
        size = self.server_size
        splits = [(n, self.num_devices - n) for n in range(size, self.num_devices, size)]
        here = (self.num_generation, self.num_training)
        return min(splits, key=lambda s: (self.expected_s(*s), s != here), default=here)


def measured(history: History) -> Split | None:
    """From the last steps: training is busy when it neither waits nor syncs, generation when it is neither held back nor
    paused. None before a step was logged."""
    step_s = history.now("perf/step_s")
    if step_s is None:
        return None
    sync_s = history.sync_s_per_step() or 0.0
    busy_s = max(step_s - sync_s, 0.0)
    devices = history.setting("run.devices", {})
    return Split(
        generation_s=max(busy_s - (history.now("rollout/backpressure_s_per_step") or 0.0), 0.0),
        training_s=max(busy_s - (history.now("perf/rollout_wait_s") or 0.0), 0.0),
        sync_s=sync_s,
        num_generation=len(devices.get("server") or []),
        num_training=history.num_ranks,
        server_size=history.setting("server.tensor_parallel_size", 1),
        overlaps=history.setting("rollout.max_staleness", 4) > 0,
    )


def sentences(history: History) -> list[str]:
    """The plan in words; the device split of a run on a CPU is given as what its two sides take."""
    split = measured(history)
    if split is None:
        return []
    here = f"{split.num_generation} for generation and {split.num_training} for training"
    lines = [
        f"Per step, generation is busy for {split.generation_s:.2f} s, training for {split.training_s:.2f} s, "
        f"the weight sync takes {split.sync_s:.2f} s (mean of the last steps)."
    ]
    sides = split.generation_s, split.training_s
    together, formula = "max(G, R) + sync", "max(G/n_g, R/n_t) + sync"
    if not split.overlaps:
        together, formula = "G + R + sync", "G/n_g + R/n_t + sync (rollout.max_staleness=0: one side at a time)"
    together += f" = {(max if split.overlaps else math.fsum)(sides) + split.sync_s:.2f} s"
    if not history.setting("run.devices"):
        return [*lines, f"{together}; on a CPU both sides share the cores."]
    if not split.num_generation:
        return [
            *lines,
            f"{together}; no split is planned, since the devices of {history.setting('server.base_url', 'the servers')} are not known here.",
        ]
    best, expected = split.best(), split.expected_s(split.num_generation, split.num_training)
    bound = f"no split of {split.num_devices} devices is faster than {split.bound_s:.2f} s"
    if best == (split.num_generation, split.num_training):
        return [
            *lines,
            f"With {here} a step takes {formula} = {expected:.2f} s, the best split; {bound}.",
        ]
    lines.append(
        f"With {here} a step takes {formula} = {expected:.2f} s; {best[0]} and {best[1]} would take "
        f"{split.expected_s(*best):.2f} s; {bound}."
    )
    if history.setting("run.num_nodes", 1) == 1:
        devices = history.setting("run.devices")
        own = sorted([*devices["server"], *devices["trainer"]])  # other GPUs of the machine may be somebody else's
        first, second = (",".join(map(str, part)) for part in (own[: best[0]], own[best[0] :]))
        lines.append(f"'run.devices={{server:[{first}],trainer:[{second}]}}' run.num_processes={best[1]}")
    return lines
