"""Models as Hugging Face's folders hold them: settings and tensors by their names, files in and out. No framework."""
