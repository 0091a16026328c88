"""A policy over many GPUs (FSDP2), servers on other nodes; imported only where a flag asks for it."""
