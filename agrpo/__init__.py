"""agrpo: asynchronous GRPO for language models. Importing it does nothing."""

__version__ = "0.1.0"
