"""The training loop and what it computes around a step."""
