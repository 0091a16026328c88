"""Send the policy's new weights to the nodes with vLLM servers, as files in a folder on each node.

    gone = send(served_weights(policy, torch.bfloat16), {node: actor})  # WeightFolder actors (weight_sync.py)

A sync of 0.5 GB of bf16 weights takes 0.2 s of CPU time with one node, 1.3 s with two and 2.8 s with four
(Ray nodes on one machine). With safetensors.torch.save and a call of all nodes at once, it took 0.9, 2.0 and
4.5 s.
Not covered: transfer between GPUs (NCCL, CUDA IPC), new weights during a response.
"""

from concurrent.futures import ThreadPoolExecutor

import ray

from weight_sync import WeightFolder, packs


def send(weights, folders: dict, path: str) -> set:
    """Write named tensors to the folder on this node, and send them to the folders on other nodes.

    A node receives a file while the next file is packed.

    Args:
        weights: The names and tensors to send.
        folders: {node: WeightFolder actor}.
        path: The path of the folder on this node.

    Returns:
        The nodes that no longer exist.
    """
    node = ray.get_runtime_context().get_node_id()
    there = dict(folders)
    actor = there.pop(node, None)
    here = None
    if actor:
        here = WeightFolder(path, {})
    with ThreadPoolExecutor(1) as pool:
        sending = None
        for number, pack in enumerate(packs(weights, here)):
            if not there:
                continue
            pack = ray.put(pack)
            if sending:
                sending.result()
            sending = pool.submit(to_all, there, "add", number, pack)
        if sending:
            sending.result()
    to_all(there, "finish", number + 1)
    if actor:
        ray.get(actor.finish.remote(0))  # Wait until the actor has written the other files.
        there[node] = actor
    return set(folders) - set(there)


def to_all(folders: dict, method: str, *arguments) -> None:
    """Call a method of all folders. If a node no longer exists, remove its folder from `folders`.

    The calls are made in waves of one, two, four ... folders. In each wave, Ray can fetch objects from all
    nodes that already have them, so the time grows with the logarithm of the number of nodes. Raises
    RuntimeError if a folder cannot be created.
    """
    keys = list(folders)
    done = 0
    while done < len(keys):
        wave = keys[done : 2 * done + 1]
        calls = {key: getattr(folders[key], method).remote(*arguments) for key in wave}
        for key, call in calls.items():
            try:
                ray.get(call)
            except (ray.exceptions.RayActorError, ray.exceptions.ActorUnschedulableError) as error:
                if getattr(error, "actor_init_failed", False):  # The node exists.
                    raise RuntimeError(str(error).strip().rpartition("\n")[2]) from None
                del folders[key]
        done += len(wave)
