"""Let vLLM's server be forked from a process that has imported vLLM, which saves 25 CPU seconds of imports.

Python runs this file at its start if PYTHONPATH names this folder. The process of the server then only waits
for the forked one (see forked.py): it passes on SIGTERM and Ctrl-C, and its death ends the forked one. A
stand-in for vLLM in PYTHONPATH is left alone, and so is the first server with the same FORKED_after_first,
which creates the file of that name.
"""

import sys

if sys.orig_argv[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]:
    import importlib.util
    import os

    is_real = importlib.util.find_spec("vllm").origin.startswith(sys.prefix)
    if is_real:
        try:
            os.close(os.open(os.environ.get("FORKED_after_first", "/"), os.O_CREAT | os.O_EXCL))
            is_real = False
        except FileExistsError:
            pass
    if is_real:
        script = os.path.join(os.path.dirname(os.path.dirname(__file__)), "fork_client.py")
        forked = [sys.executable, "-I", "-S", script, os.environ["FORKED_servers"]]
        os.execv(sys.executable, forked + sys.orig_argv[1:])
