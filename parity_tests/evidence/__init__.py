"""Evidence on disk: stores of tensors, and what becomes of them."""
