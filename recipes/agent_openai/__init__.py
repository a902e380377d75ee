"""An agent written with the `openai` client asks a small chat model, and asks again after a wrong answer."""
