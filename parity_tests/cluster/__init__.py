"""Examples for clusters: valid against their schemas, and their commands are real ones."""
