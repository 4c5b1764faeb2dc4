"""What both backends share: words, shapes, numbers, data and the parity engine. Imports neither torch nor jax."""
