"""Callbacks of a user: a class as for transformers, one with a state, a plain function, and some that go wrong."""

from transformers import TrainerCallback

CALLS = []


class Recorder(TrainerCallback):
    """Notes every event with the step; stops the run and asks for a checkpoint where it is told to."""

    stop_at, save_at = None, None

    def on_train_begin(self, args, state, control, **kwargs):
        CALLS.append(("begin", state.global_step, sorted(kwargs), args.run.max_steps))

    def on_step_end(self, args, state, control, **kwargs):
        CALLS.append(("step", state.global_step, state.is_world_process_zero))
        control.should_training_stop = state.global_step == self.stop_at
        control.should_save = state.global_step == self.save_at
        return control

    def on_log(self, args, state, control, logs=None, **kwargs):
        CALLS.append(("log", state.global_step, logs))

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        CALLS.append(("evaluate", metrics))

    def on_sync(self, args, state, control, version=None, **kwargs):
        CALLS.append(("sync", version))


class Counter:
    """Counts steps over a resume."""

    def __init__(self):
        self.count = 0

    def on_step_end(self, args, state, control, **kwargs):
        self.count += 1

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Set(Counter):
    """Has a state that JSON cannot hold."""

    def state_dict(self):
        return {1, 2}


class Broken:
    def on_log(self, args, state, control, logs, **kwargs):
        raise KeyError("rewards")


class NeedsArgument:
    def __init__(self, path):
        pass

    def on_save(self, *args, **kwargs):
        pass


class Nothing:
    def on_step(self):
        pass


def note(event, args, state, control, **kwargs):
    CALLS.append(("note", event))


def write_lines(event, args, state, control, logs=None, folder=None, **kwargs):
    """For whole runs: one line per event in the run's folder."""
    with open(f"{args.run.output_dir}/events.txt", "a") as file:
        file.write(f"{event} {state.global_step}\n")
    if event == "on_step_end" and state.global_step == 2:
        control.should_training_stop = True
