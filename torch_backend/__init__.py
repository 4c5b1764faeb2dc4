"""The PyTorch trainer: the session that is judged. Never imports jax."""
