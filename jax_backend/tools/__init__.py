"""Observe a step: sketches and attention logits."""
