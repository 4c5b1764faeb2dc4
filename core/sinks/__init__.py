"""Send records, checks and notes to the terminal, JSON lines and Weights & Biases. Each sink decides what it keeps."""
