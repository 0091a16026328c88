"""A policy on many GPUs (FSDP2) and servers on other nodes, imported only by runs that need them."""
