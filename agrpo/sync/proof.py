"""Proof that weights arrived: server and trainer give the same log-probabilities to the same tokens (SRV-16, SYNC-16).

The server samples a short answer to a fixed prompt with a fixed seed; the trainer scores exactly these tokens and the
server's most likely alternatives. It runs after the resume, since a paused server answers nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from agrpo.errors import ServerError
from agrpo.sync.control import ServerControl
from agrpo.sync.session import PLUGIN, of_rank_0

# Where both sides compute in this dtype, equal weights agree much better than `server.parity_limit` asks.
EXACT_DTYPES = {"float32": 1e-3}
SEED = 20_011
SAME = 1e-7  # two answers of the same weights to the same request


@dataclass(frozen=True, slots=True)
class Answer:
    """What the server gave: K values per token, the sampled token first."""

    output_ids: np.ndarray  # [n] int32
    ids: np.ndarray  # [n, K] int32
    sampler_logprobs: np.ndarray  # [n, K] float64


# (token_ids [L] int32, ids [n, K] int32) -> [n, K] log-probs of `ids` at the last n tokens, temperature 1
TrainerLogprobs = Callable[[np.ndarray, np.ndarray], np.ndarray]


class Proof:
    """Compares the two sides; each server's last answer tells "nothing arrived" from "something else arrived"."""

    def __init__(
        self,
        server: ServerControl,
        *,
        model: str | None,
        prompt_ids: Sequence[int],
        parity_limit: float | None,
        trainer_dtype: str,
        rank: int = 0,
        world_size: int = 1,
        num_tokens: int = 16,
        num_alternatives: int = 4,
    ):
        self.server, self.model, self.prompt_ids = server, model, [int(i) for i in prompt_ids]
        self.parity_limit, self.trainer_dtype = parity_limit, trainer_dtype
        self.rank, self.world_size = rank, world_size
        self.num_tokens, self.num_alternatives = num_tokens, num_alternatives
        self._last: dict[str, Answer] = {}

    def check(self, trainer_logprobs: TrainerLogprobs, version: int, model: str | None = None) -> float:
        """Mean abs(trainer - server log-prob), the worst over the servers; all ranks call it, all get the result.

        `model` is what to ask for where a version has a name of its own. Raises ServerError above the limit (null =
        measure only), with what the difference looks like.
        """
        worst = 0.0
        for url in self.server.urls:
            answer, failure = self._shared(lambda url=url: self._ask(url, model or self.model))
            if failure is not None:
                raise ServerError(failure)
            sequence = np.concatenate([np.asarray(self.prompt_ids, np.int32), answer.output_ids])
            scored = np.asarray(trainer_logprobs(sequence, answer.ids), np.float64)
            difference = scored - answer.sampler_logprobs
            value, failure = self._shared(lambda url=url, a=answer, d=difference: self._judge(url, a, d, version))
            if failure is not None:
                raise ServerError(failure)
            self._last[url] = answer
            worst = max(worst, value)
        return worst

    def _judge(self, url: str, answer: Answer, difference: np.ndarray, version: int) -> tuple[float, str | None]:
        value = float(np.abs(difference).mean())
        limit, why = self._limit()
        if limit is None or value <= limit:
            return value, None
        reading = read_difference(answer, self._last.get(url), difference)
        return value, (
            f"the weights of version {version} did not arrive at {url}: mean abs log-prob difference {value:.3g} nats "
            f"over {difference.size} values, limit {limit:g} ({why}); {reading}"
        )

    def _ask(self, url: str, model: str | None) -> tuple[Answer | None, str | None]:
        params = {
            "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": SEED, "max_tokens": self.num_tokens,
            "logprobs": self.num_alternatives,
        }  # fmt: skip
        try:
            choice = self.server.generate(url, self.prompt_ids, model, params)
            return parse_answer(choice, self.num_alternatives), None
        except ServerError as error:
            return None, f"the proof that weights arrived got no answer: {error}"
        except (KeyError, TypeError, ValueError, IndexError) as error:
            return None, f"the proof that weights arrived got an unreadable answer from {url}: {error!r}"

    def _limit(self) -> tuple[float | None, str]:
        exact = EXACT_DTYPES.get(self.trainer_dtype)
        if self.parity_limit is None:
            return None, ""
        if exact is not None and exact < self.parity_limit and self.server.dtype_name() == self.trainer_dtype:
            return exact, f"{self.trainer_dtype} on both sides; server.parity_limit=null turns the check off"
        return self.parity_limit, "server.parity_limit"

    def _shared(self, compute: Callable):
        """The value computed on rank 0, on every rank."""
        return of_rank_0(compute() if self.rank == 0 else None, self.world_size)


def parse_answer(choice: dict, num_alternatives: int) -> Answer:
    """The sampled token and its alternatives per position; a row with too few repeats its sampled token."""
    ids, values = [], []
    for entry in choice["logprobs"]["content"]:
        listed = {int(entry["token_id"]): float(entry["logprob"])}
        for other in entry.get("top_logprobs") or []:
            listed.setdefault(int(other["token_id"]), float(other["logprob"]))
        row = list(listed.items())[: num_alternatives + 1]
        row += [row[0]] * (num_alternatives + 1 - len(row))
        ids.append([token for token, _ in row])
        values.append([value for _, value in row])
    if not ids:
        raise ValueError("no tokens")
    return Answer(np.asarray(choice["token_ids"], np.int32), np.asarray(ids, np.int32), np.asarray(values, np.float64))


def read_difference(answer: Answer, last: Answer | None, difference: np.ndarray) -> str:
    """What a difference of log-probs [n, K] (trainer - server) looks like, in words that tell where to look."""
    if not np.isfinite(difference).all():
        return "some values are not finite: the weights or the answer are broken"
    if last is not None and answer.ids.shape == last.ids.shape and np.array_equal(answer.ids, last.ids):
        if np.abs(answer.sampler_logprobs - last.sampler_logprobs).max() <= SAME:
            return "nothing changed: the server answers exactly as at the last proof, so nothing arrived"
    center = float(np.median(difference))
    if np.abs(difference - center).mean() < 0.25 * abs(center):
        return (
            f"all shifted: every value is off by about {center:+.3g}, so the server's log-probs are not those of the "
            "plain softmax at temperature 1 (check --logprobs-mode processed_logprobs)"
        )
    return (
        "partly changed: the values differ from one another, so some weights did not arrive, or arrived under another "
        "name, or the server runs another model. vLLM's CPU build keeps a packed copy of tied embeddings, which only "
        f"agrpo's plug-in refreshes: start it with agrpo serve, or with {PLUGIN} on its PYTHONPATH"
    )
