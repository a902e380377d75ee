"""TRL's asynchronous rollout loop against the server at a URL; prints its tokens per CPU second. Run where TRL is."""

import json
import pickle
import queue
import sys
import threading
import time
import warnings
from types import SimpleNamespace

URL, GROUPS, TOKENS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
WARM_UP = 8  # groups


class Words:
    """A tokenizer whose prompt is always the same 256 ids; its cost is not what is measured."""

    pad_token_id, eos_token, chat_template, response_template, response_schema = 0, "</s>", None, None, {}

    def apply_chat_template(self, messages, **_):
        return list(range(2, 258))

    def parse_response(self, ids, **_):
        return {"role": "assistant", "content": "x" * len(ids)}


class Sink:
    """The queue to the trainer without a pipe: every sample is pickled, as a process queue does."""

    def put_nowait(self, item):
        pickle.dumps(item)

    def qsize(self):
        return 0


def main():
    warnings.simplefilter("ignore")
    from accelerate.state import PartialState
    from trl.experimental.async_grpo.async_rollout_worker import _AsyncRolloutLoop

    PartialState()
    seen, marks = [], []

    async def reward(completion_ids, **_):
        """By the first generated token: cheap, and different within a group."""
        seen.append(None)
        if len(seen) in (WARM_UP, WARM_UP + GROUPS):
            marks.append((time.process_time(), loop._total_completion_tokens))
        if len(seen) == WARM_UP + GROUPS:
            loop._stop_event.set()
        return [float(ids[0]) for ids in completion_ids]

    loop = _AsyncRolloutLoop(
        model_name="stub",
        dataset=[{"prompt": [{"role": "user", "content": "?"}]}],
        reward_funcs=[reward],
        processing_class=Words(),
        eos_token_ids=[1],
        rollout_buffer=Sink(),
        model_version_value=SimpleNamespace(value=1),
        heartbeat_value=SimpleNamespace(value=0.0),
        failed_event=threading.Event(),
        exception_info_queue=queue.Queue(),
        metrics_queue=queue.Queue(maxsize=4096),
        num_generations=8,
        max_inflight_tasks=64,
        vllm_server_url=URL,
        max_tokens=TOKENS,
    )
    loop.run()
    (cpu, tokens), (cpu_end, tokens_end) = marks
    print(json.dumps({"tokens_per_s": (tokens_end - tokens) / (cpu_end - cpu)}))


main()
