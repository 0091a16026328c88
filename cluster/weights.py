"""The policy's new weights on their way to vLLM servers: files in a folder on each of their nodes.

    gone = send(served_weights(policy, torch.bfloat16), {node: actor})     # actors of WeightFolder

Left out: transfer from GPU to GPU (NCCL, CUDA IPC), new weights in the middle of a response.
"""

import json
from concurrent.futures import ThreadPoolExecutor

import ray
import torch

PACK = 2**29  # bytes of weights that travel together
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}  # in a safetensors header


def packs(weights):
    """Named tensors of one dtype -> the contents of safetensors files, as arrays of bytes.

    Each tensor is copied once, to its place in a buffer; that is written anew for the next file, so who takes
    one has to be done with it by then.
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
    """Named tensors -> dictionaries with at most PACK bytes of them each (one that is larger alone)."""
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
    """What a safetensors file begins with: eight bytes with the length of what follows, what lies where."""
    entries = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, tensor in tensors.items():
        end = start + tensor.nbytes
        shape = list(tensor.shape)
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of their size
    return bytearray(len(text).to_bytes(8, "little") + text)


def send(weights, folders: dict) -> set:
    """Named tensors to these folders, {node: WeightFolder's actor}. Returns the nodes that are gone."""
    there = dict(folders)
    with ThreadPoolExecutor(1) as pool:
        sending = None
        for number, pack in enumerate(packs(weights)):
            pack = ray.put(pack)
            if sending:
                sending.result()
            sending = pool.submit(to_all, there, "add", number, pack)  # while the next one is packed
        sending.result()
    to_all(there, "finish")
    return set(folders) - set(there)


def to_all(folders: dict, method: str, *arguments) -> None:
    """A method of all folders; those whose node is gone are taken out of them.

    First of one, then of two, four, ...: Ray fetches an object from any node that has it, and so a pack
    leaves rank 0's node about as often as every other's.
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
