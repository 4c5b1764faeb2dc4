"""Several processes: process groups, DDP, FSDP."""
