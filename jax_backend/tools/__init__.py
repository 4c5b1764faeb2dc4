"""Looking at a step: sketches and attention logits."""
