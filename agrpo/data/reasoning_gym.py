"""Generated problems of the reasoning-gym package: any of its tasks, as many as asked for, without a download."""

from __future__ import annotations

import difflib
import importlib.metadata
import importlib.util
import json
from dataclasses import dataclass
from typing import Any

from agrpo.data.rows import digest, refuse
from agrpo.schema import setting

INSTALL = 'pip install "agrpo[gym]"'
QUESTION = "{question}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReasoningGym:
    """Columns: prompt, question, answer, solution (the answer under the name the accuracy reward reads), metadata."""

    dataset: str = setting(doc="name of a reasoning-gym task, for example chain_sum")
    config: dict[str, Any] = setting(factory=dict, doc="settings of the task, for example {min_terms: 2, max_terms: 3}")
    size: int = setting(10_000, "number of problems", ge=1)
    generator_seed: int = setting(0, "seed of the problems; another seed gives other problems", ge=0)
    system: str | None = setting(None, "system message; null = none")
    template: str = setting(QUESTION, "user message; {question} is replaced by the problem")
    shuffle: bool = setting(False, "visit the rows in a new order every epoch instead of generation order")
    seed: int | None = setting(None, "seed of the order; null = run.seed", ge=0)

    def open(self, needs_prompt: bool = True) -> GymRows:
        refuse(self._own_problems())
        return GymRows(self)

    def columns(self) -> list[str] | None:
        return ["prompt", "question", "answer", "solution", "metadata"]

    def problems(self, config: Any) -> list[str]:
        return self._own_problems()

    def _own_problems(self) -> list[str]:
        if importlib.util.find_spec("reasoning_gym") is None:
            return [f"data: package `reasoning_gym` is not installed; run: {INSTALL}"]
        lines = []
        if QUESTION not in self.template:
            lines.append(f"data.template must contain {QUESTION}, got {self.template!r}")
        from reasoning_gym.factory import DATASETS

        if self.dataset not in DATASETS:
            near = difflib.get_close_matches(self.dataset, DATASETS, n=3) or sorted(DATASETS)[:3]
            lines.append(
                f"data.dataset: {self.dataset} is not one of the {len(DATASETS)} tasks; nearest: {', '.join(near)}"
            )
            return lines
        try:
            self.generator()
        except (TypeError, ValueError, AssertionError) as error:
            lines.append(f"data.config: {self.dataset} refuses {json.dumps(dict(self.config), default=str)}: {error}")
        return lines

    def generator(self) -> Any:
        """The package's own data set: item i depends on (settings, generator_seed, i) only."""
        import reasoning_gym

        settings = {"size": self.size, "seed": self.generator_seed, **self.config}
        return reasoning_gym.create_dataset(self.dataset, **settings)


class GymRows:
    """Problems, generated when asked for."""

    def __init__(self, source: ReasoningGym):
        self._source, self._generator = source, source.generator()
        version = importlib.metadata.version("reasoning-gym")
        facts = [
            source.dataset,
            dict(source.config),
            source.size,
            source.generator_seed,
            source.system,
            source.template,
            version,
        ]
        self.fingerprint = f"{len(self)}-{digest(json.dumps(facts, sort_keys=True, default=str).encode())}"

    def __len__(self) -> int:
        return len(self._generator)

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = self._generator[index]
        source = self._source
        system = [] if source.system is None else [{"role": "system", "content": source.system}]
        user = {"role": "user", "content": source.template.replace(QUESTION, item["question"])}
        answer = str(item["answer"])
        return {
            "prompt": [*system, user],
            "question": item["question"],
            "answer": answer,
            "solution": answer,
            "metadata": item["metadata"],
        }
