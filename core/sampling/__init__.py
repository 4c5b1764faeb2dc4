"""Text from a model: drawing the next token, one token at a time."""
