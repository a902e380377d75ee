"""Built-in rewards against the documents' examples and hand-made answers."""

import threading

import pytest

from agrpo.scorer import rewards


def answers(*texts):
    return [[{"role": "assistant", "content": text}] for text in texts]


def test_length_example():
    assert rewards.completion_length(
        completion_ids=[[6303, 13], [304, 279, 12884, 13]], prompts=[], completions=[]
    ) == [2.0, 4.0]


def test_format_example():
    good = "<think>The sum of 1 and 2 is 3, which we multiply by 4 to get 12.</think><answer>(1 + 2) * 4 = 12</answer>"
    bad = "The sum of 3 and 1 is 4, which we multiply by 2 to get 8. So (3 + 1) * 2 = 8."
    assert rewards.think_answer_format(completions=answers(good, bad)) == [1.0, 0.0]


def test_boxed_example():
    completions = answers(r"The solution is \boxed{2}.", r"The solution is \boxed{6}.")
    assert rewards.boxed_match(completions=completions, ground_truth=["2", "5"]) == [1.0, 0.0]
    assert rewards.boxed(r"\boxed{1} then \boxed{\frac{1}{2}} and \boxed{open") == r"\frac{1}{2}"


CASES = [
    (r"It is \boxed{\frac{1}{2}}", "0.5", 1.0),
    (r"First 7, but \boxed{12}", "12", 1.0),
    ("The answer is 214.", "214", 1.0),
    ("The answer is 214.", "-4", 0.0),
    ("", "3", 0.0),
    (r"\boxed{(1,2)}", "(1,2)", 1.0),
    (r"$\frac{2}{3}$", r"\frac{2}{3}", 1.0),
    ("\\boxed{A}", "A", 1.0),
    ("anything", "", None),
    ("anything", "no number here", None),
]


def test_accuracy_including_unreadable_references():
    pytest.importorskip("math_verify")
    texts, solutions, expected = zip(*CASES, strict=True)
    assert rewards.accuracy_reward(completions=answers(*texts), solution=list(solutions)) == list(expected)


def test_accuracy_outside_the_main_thread():
    pytest.importorskip("math_verify")
    results = []
    thread = threading.Thread(
        target=lambda: results.extend(
            rewards.accuracy_reward(completions=answers(r"\boxed{2}", "3"), solution=["2", "2"])
        )
    )
    thread.start()
    thread.join()
    assert results == [1.0, 0.0]


def test_reasoning_gym_scores_its_own_tasks():
    pytest.importorskip("reasoning_gym")
    from agrpo.data.reasoning_gym import ReasoningGym

    row = ReasoningGym(dataset="chain_sum", config={"min_terms": 2, "max_terms": 2}, size=5).open()[3]
    texts = (
        f"<think>well</think> <answer>{row['answer']}</answer>",
        f"so \\boxed{{{row['answer']}}}",
        row["answer"],
        "x",
    )
    columns = {name: [row[name]] * 4 for name in ("question", "answer", "metadata")}
    values = rewards.reasoning_gym_reward(completions=answers(*texts), **columns)
    assert values[:3] == [1.0, 1.0, 1.0] and values[3] < 0.5


def test_final_answer_prefers_tags_then_box_then_the_text_after_thinking():
    assert rewards.final_answer("<answer>1</answer> <answer> 2 </answer> \\boxed{3}") == "2"
    assert rewards.final_answer("\\boxed{3}, surely") == "3"
    assert rewards.final_answer("<think>hm 9</think> 4 ") == "4"
