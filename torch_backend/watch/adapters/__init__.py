"""`watch` for the training loops of libraries: one file each, which imports its library at the first use."""
