"""Training over several processes: process groups, DDP, FSDP."""
