"""The producing loop with its real parts: a server process, the wire's two ends, the real advantage; rewards are scripted
unless reward functions are named."""

import asyncio
import dataclasses
import secrets
from types import SimpleNamespace as Bag

from agrpo import wire
from agrpo.advantage import Grouped
from agrpo.env.player import Player, Rules
from agrpo.env.render import Renderer
from agrpo.lifecycle import Life
from agrpo.metrics.window import Window
from agrpo.rollout.concurrency import Cap, Places
from agrpo.rollout.custom import Custom
from agrpo.rollout.failures import Failures
from agrpo.rollout.judge import Judge
from agrpo.rollout.loop import Loop, Policy
from agrpo.rollout.play import Slots
from agrpo.rollout.server_watch import ServerWatch
from agrpo.sampler.vllm import Vllm
from agrpo.scorer.functions import Functions
from agrpo.sections import Rollout as Settings
from agrpo.sections import Run
from agrpo.types import Prompt, ReadyGroup

KEY, G, TOKENS, PROMPT_TOKENS = secrets.token_hex(16), 3, 7, 5
RAW = PROMPT_TOKENS + TOKENS


class Words:
    eos_token_id = 1

    def apply_chat_template(self, messages, **_):
        return list(range(2, 2 + int(messages[0]["content"])))

    def decode(self, ids, skip_special_tokens=True):
        return " ".join(map(str, ids))


class Prompts:
    def __init__(self, lengths=None):
        self.lengths = lengths or {}

    def __len__(self):
        return 5

    def prompt_of(self, group_id):
        length = self.lengths.get(group_id, PROMPT_TOKENS)
        return Prompt(group_id % 5, group_id // 5, [{"role": "user", "content": str(length)}], {})


class Scripted:
    """Rewards by a function of (group id, slot), None keeps those of the player; an exception it returns is raised."""

    def __init__(self, reward, delay_s=0.0):
        self.reward, self.delay_s, self.num_now, self.num_most = reward, delay_s, 0, 0

    async def score(self, group):
        self.num_now += 1
        self.num_most = max(self.num_most, self.num_now)
        await asyncio.sleep(self.delay_s)
        self.num_now -= 1
        if self.reward is None:
            return group
        values = [self.reward(group.group_id, slot) for slot in range(len(group.rollouts))]
        for value in values:
            if isinstance(value, Exception):
                raise value
        played = zip(group.rollouts, values, strict=True)
        scored = (dataclasses.replace(r, rewards={"points": v}) if r.failure is None else r for r, v in played)
        return dataclasses.replace(group, rollouts=tuple(scored))


class Trainer:
    """The other end of the wire; takes everything at once unless told to hold."""

    def __init__(self, start, takes=True):
        self.ready, self.resolved, self.evals, self.states, self.window = [], [], [], [], Window()
        self.takes, self.taken, self.limit = takes, start.taken_tokens, start.limit_tokens
        self.listener = wire.Listener("127.0.0.1", 0, KEY, lambda: start, self.receive)

    def receive(self, message):
        if isinstance(message, ReadyGroup):
            self.ready.append(message)
            if self.takes:
                self.take(message.raw_tokens)
        elif isinstance(message, wire.Resolved):
            self.resolved.append((message.group_id, message.reason))
        elif isinstance(message, wire.Metrics):
            self.window.merge(message.window)
        elif isinstance(message, wire.EvalResult):
            self.evals.append(message)
        elif isinstance(message, wire.LoopState):
            self.states.append(message.state)

    def take(self, tokens):
        self.taken += tokens
        self.listener.send(wire.Credit(self.taken, self.taken, self.limit))

    @property
    def num_done(self):
        return len(self.ready) + len(self.resolved)


async def until(condition, timeout_s=10.0):
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


def produce(
    url,
    tmp_path,
    scenario,
    *,
    start=None,
    takes=True,
    reward=lambda group, slot: float(slot),
    score_s=0.0,
    functions=None,
    cap=64,
    queue_size=16,
    max_concurrent_groups=8,
    prompts=None,
    evaluations=None,
    accept=None,
    max_retries=0,
    retry_wait_s=1.0,
    loop_class=None,
    player_of=None,
    advantage=None,
    run=None,
    **settings,
):
    """Run the loop while `scenario(trainer, loop)` drives it, then finish; the trainer's end, as it was left."""
    start = start or wire.Start(0, 1, [], [], 0, 0, 10_000)
    advantage = advantage or Grouped()

    async def produced():
        trainer = Trainer(start, takes)
        link = await wire.connect("127.0.0.1", trainer.listener.port, KEY)
        section, window, policy = Settings(group_size=G, **settings), Window(strict=True), Policy(start.version)
        sampler = Vllm(max_completion_length=TOKENS, num_sampler_logprobs=2, max_retries=max_retries)
        client = await sampler.connect((url,), None, 42, lambda: policy.version, 10.0, 64, True, window, retry_wait_s)
        places = Places(Cap(cap, cap))
        player = Player(Words(), Rules(client.max_model_len, frozenset({1})), {"": Renderer(Words())})
        if player_of is not None:
            player = player_of(sampler, section, client.max_model_len, lambda: policy.version)
        custom = None
        if loop_class is not None:
            loss = Bag(wants_head=True)
            config = Bag(
                rollout=section, sampler=sampler, advantage=advantage, loss=loss, run=run or Run(output_dir="x")
            )
            custom = Custom(loop_class(), config, Words(), lambda: policy.version)
            trainer.custom, player = custom.loop, custom.player(player)
            await custom.setup(start.loop_state)
        failures = Failures(section.max_failure_frac, section.failure_window)
        live = None if functions is None else await Functions(functions=functions).open(None)
        scorer = live or Scripted(reward, score_s)
        loop = Loop(
            settings=section,
            prompts=prompts or Prompts(),
            player=player,
            client=client,
            judge=Judge(
                scorer,
                advantage,
                section,
                TOKENS,
                queue_size,
                max_concurrent_groups,
                accept,
                window,
                custom=custom,
                merged=getattr(player, "merged", lambda group: group),
            ),
            slots=Slots(player, client, places, failures, section.on_error == "abort"),
            places=places,
            watch=ServerWatch(client, places.cap, places, section.concurrency.poll_interval, window),
            link=link,
            policy=policy,
            evaluations=evaluations or {},
            window=window,
            life=Life(tmp_path, "rollout"),
            custom=custom,
        )
        trainer.scorer = scorer
        work = asyncio.create_task(loop.run())
        drive = asyncio.create_task(scenario(trainer, loop))
        try:
            await asyncio.wait([work, drive], return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            drive.result()
            trainer.listener.send(wire.Finish())
            async with asyncio.timeout(5):
                await work
        finally:
            drive.cancel()
            work.cancel()
            if custom is not None:
                await custom.close()
            if live is not None:
                await live.close()
            await client.close()
            await link.close()  # first: the listener reads until its other end has closed
            trainer.listener.close()
        return trainer

    return asyncio.run(produced())


def done(n):
    async def scenario(trainer, loop):
        await until(lambda: trainer.num_done >= n)

    return scenario
