"""Models in Hugging Face's folders: settings and tensors by their names, reading and writing. No framework."""
