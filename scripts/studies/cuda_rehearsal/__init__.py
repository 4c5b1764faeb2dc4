"""The trainer on a GPU that is not there: what torch's CUDA build does above a stand-in for CUDA (`standin/`)."""
