"""Where records, checks and notes go: the terminal, JSON lines, Weights & Biases. Each sink decides what it keeps."""
