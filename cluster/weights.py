"""The policy's new weights on their way to vLLM servers: files in a folder on each of their nodes.

    gone = send(served_weights(policy, torch.bfloat16), {node: actor})     # actors of WeightFolder

Left out: transfer from GPU to GPU (NCCL, CUDA IPC), new weights in the middle of a response.
"""

import json
import os
import shutil
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ray
import torch

PACK = 2**29  # bytes of weights that travel together
# vLLM's classes of these models use the embedding as head and reject a separate one.
NO_HEAD = {"Gemma2ForCausalLM"}
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}  # in a safetensors header


def served_weights(policy, dtype: torch.dtype):
    """The policy's named tensors as vLLM's class of the model wants them."""
    has_no_head = type(policy.model).__name__.removeprefix("FSDP") in NO_HEAD
    for name, tensor in policy.weights(dtype):
        if name != "lm_head.weight" or not has_no_head:
            yield name, tensor


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


class WeightFolder:
    """The policy's model folder for the servers of one node: used directly, or as a Ray actor there.

    files: what goes with the weights, {name: content}. New weights replace old ones file by file: a server
    that starts just then may fail, and starts again, or get some of each; it reads all of them once more
    before it is asked anything. A folder of this user that is there is taken over: its actor may have died.
    PermissionError where another user has made it, who could read or replace the weights.
    """

    def __init__(self, path: str, files: dict[str, bytes]):
        self.path = Path(path)
        self.path.mkdir(mode=0o700, exist_ok=True)
        found = os.lstat(self.path)  # not where a link leads to
        if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
            raise PermissionError(f"policy servers: {path} is not this user's folder; remove it")
        os.chmod(self.path, 0o700)
        for name, content in files.items():
            (self.path / name).parent.mkdir(exist_ok=True)
            (self.path / name).write_bytes(content)
        self.writer = ThreadPoolExecutor(1)
        self.written = []

    def write(self, number: int, pack) -> None:
        """Takes a part of the weights, from 0 on: the contents of a safetensors file."""
        name = f"model_{number}" if number else "model"
        (self.path / f"{name}.safetensors").write_bytes(memoryview(pack))

    def add(self, number: int, pack) -> None:
        """The same, while the next one is on its way. `pack` must stay as it is."""
        self.written.append(self.writer.submit(self.write, number, pack))

    def finish(self) -> None:
        """Returns when all is written. OSError where that failed."""
        for write in self.written:
            write.result()
        self.written = []

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
