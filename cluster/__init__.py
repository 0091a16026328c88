"""A policy on many GPUs (FSDP2), and servers on other nodes. Only runs that need them import this package."""
