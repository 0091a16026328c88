"""Send the policy's new weights to the nodes with vLLM servers, as files in a folder on each node.

    gone = send(served_weights(policy, torch.bfloat16), {node: actor})     # WeightFolder actors (rollout.py)

Not covered: transfer between GPUs (NCCL, CUDA IPC), new weights during a response.
"""

import json
from concurrent.futures import ThreadPoolExecutor

import ray
import torch

PACK = 2**29  # number of bytes to send as one object
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}  # names in safetensors headers


def packs(weights):
    """Yield named tensors of one dtype as the contents of safetensors files, which are arrays of bytes.

    Each tensor is copied only once, to its place in a buffer. (safetensors.torch.save copies it twice.) The
    next file overwrites the buffer, so the caller must finish with a file before it requests the next one.
    """
    buffer = torch.empty(0, dtype=torch.uint8)
    for tensors in portions(weights):
        header = header_of(tensors)
        size = len(header) + sum(tensor.nbytes for tensor in tensors.values())
        if len(buffer) < size:
            buffer = torch.empty(size, dtype=torch.uint8)
        start = len(header)
        buffer[:start] = torch.frombuffer(header, dtype=torch.uint8)
        for tensor in tensors.values():
            end = start + tensor.nbytes
            buffer[start:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            start = end
        yield buffer.numpy()[:size]


def portions(weights):
    """Yield named tensors in dictionaries of at most PACK bytes. A larger tensor gets its own dictionary."""
    tensors = {}
    size = 0
    for name, tensor in weights:
        if tensors and size + tensor.nbytes > PACK:
            yield tensors
            tensors = {}
            size = 0
        tensors[name] = tensor
        size += tensor.nbytes
    yield tensors


def header_of(tensors: dict) -> bytearray:
    """Return the start of a safetensors file: eight bytes with the header's length, then the header."""
    entries = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, tensor in tensors.items():
        end = start + tensor.nbytes
        shape = list(tensor.shape)
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # Tensors must be aligned to the size of their elements.
    return bytearray(len(text).to_bytes(8, "little") + text)


def send(weights, folders: dict) -> set:
    """Send named tensors to folders on several nodes while packing the next tensors.

    Args:
        weights: The names and tensors to send.
        folders: {node: WeightFolder actor}.

    Returns:
        The nodes that no longer exist.
    """
    there = dict(folders)
    with ThreadPoolExecutor(1) as pool:
        sending = None
        for number, pack in enumerate(packs(weights)):
            pack = ray.put(pack)
            if sending:
                sending.result()
            sending = pool.submit(to_all, there, "add", number, pack)
        sending.result()
    to_all(there, "finish")
    return set(folders) - set(there)


def to_all(folders: dict, method: str, *arguments) -> None:
    """Call a method of all folders. If a node no longer exists, remove its folder from `folders`.

    The calls are made in waves of one, two, four ... folders. In each wave, Ray can fetch objects from all
    nodes that already have them, so the time grows with the logarithm of the number of nodes.
    """
    keys = list(folders)
    done = 0
    while done < len(keys):
        wave = keys[done : 2 * done + 1]
        calls = {key: getattr(folders[key], method).remote(*arguments) for key in wave}
        for key, call in calls.items():
            try:
                ray.get(call)
            except (ray.exceptions.RayActorError, ray.exceptions.ActorUnschedulableError):
                del folders[key]
        done += len(wave)
