"""A real pretrained chat model, SmolLM2-135M-Instruct, on generated arithmetic problems."""
