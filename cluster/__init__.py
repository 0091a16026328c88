"""A policy on GPUs (FSDP2), servers on other nodes, and the placement of both in Ray.

Runs on GPUs, runs with several ranks and runs with --genrm import this package.
"""
