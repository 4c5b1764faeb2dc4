"""The PyTorch trainer, whose steps the parity checks judge. It never imports jax."""
