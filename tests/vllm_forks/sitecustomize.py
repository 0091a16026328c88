"""Let vLLM's server fork its engine, which saves the engine 10 CPU seconds of imports.

Python runs this file at its start if PYTHONPATH names this folder. On a CPU, vLLM insists on a new Python for
the engine. The processes stay the same otherwise: the engine is a child of the server.

Servers of each kind also start as users start them: judges and a classifier in test_genrm_server.py, and
policy servers in test_rollout.py.
"""

import sys

if sys.orig_argv[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]:
    import multiprocessing

    fork = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda method=None: fork
