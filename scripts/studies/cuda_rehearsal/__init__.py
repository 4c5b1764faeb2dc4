"""The trainer without a GPU: torch's CUDA build above a stand-in for CUDA (`standin/`)."""
