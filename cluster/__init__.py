"""A policy on many GPUs (FSDP2) and servers on other nodes, imported only if a run uses GPUs or ranks."""
