"""Weights for vLLM servers: safetensors files in a folder, and checksums that show what the servers loaded.

    folder = WeightFolder("/dev/shm/policy", {"config.json": b"..."})
    sent = {}
    for _ in packs(summed(weights, sent), folder): ...  # writes the files, and fills `sent`
    kept = compare("server 0", sent, held)              # `held`: one result per worker of a vLLM server
    compare("server 0", sent, held, kept)               # raises RuntimeError if a sync was lost

A server with `--worker-extension-cls weight_sync.WorkerExtension` returns its workers' checksums for POST
/collective_rpc {"method": "weight_sums"}. vLLM's workers import this file, so it imports nothing from this
repository. Not covered: weights that vLLM does not keep as they are sent. It merges some (queries, keys and
values; gate and up projections; experts), repacks all linear layers on a CPU, and may quantize.
"""

import contextlib
import errno
import json
import mmap
import os
import shutil
import socket
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

# ---- files

PACK = 2**29  # number of bytes of weights in a file, unless a single tensor has more
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}  # names in safetensors headers


def packs(weights, folder: "WeightFolder | None"):
    """Yield the contents of safetensors files (arrays of bytes) with these named tensors.

    Each tensor is copied only once: into a memory-mapped file of the folder, or without a folder into a
    buffer. The buffer is reused, so the caller must finish with each array before it requests the next one.
    """
    buffer = torch.empty(0, dtype=torch.uint8)
    for number, tensors in enumerate(portions(weights)):
        # Larger elements come first, because each tensor must be aligned to the size of its elements.
        tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].itemsize))
        header = torch.frombuffer(header_of(tensors), dtype=torch.uint8)
        parts = [header, *tensors.values()]
        size = sum(part.nbytes for part in parts)
        if folder:
            buffer = folder.map_file(number, size)
        elif len(buffer) < size:
            buffer = torch.empty(size, dtype=torch.uint8)
        start = 0
        for part in parts:
            end = start + part.nbytes
            buffer[start:end].view(part.dtype).view(part.shape).copy_(part)
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
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": tensor.shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # Tensors must be aligned to the size of their elements.
    return bytearray(len(text).to_bytes(8, "little") + text)


class WeightFolder:
    """The policy's model folder for the servers on one node, used directly or as a Ray actor on that node.

    `files` are the files other than the weights, {name: content}. New weights overwrite old ones in place,
    because new files would need new pages of memory. A server that starts during a write may fail and
    restart, or read a mixture of old and new weights. In both cases, the server reloads the weights before it
    gets a request. An existing folder of this user is reused, because its actor may have died. Raises
    PermissionError if another user owns the folder and could change the weights.
    """

    # All files that this process has mapped: {path: (state of the file, its bytes, is registered with CUDA)}.
    mapped = {}
    can_register = True  # whether this process can register memory with CUDA

    def __init__(self, path: str, files: dict[str, bytes]):
        self.path = Path(path)
        self.path.mkdir(mode=0o700, exist_ok=True)
        found = os.lstat(self.path)  # lstat does not follow links.
        if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
            where = f"{path} on {socket.gethostname()}"
            raise PermissionError(f"policy servers: {where} is not a folder that this user owns; remove it")
        os.chmod(self.path, 0o700)
        with self.naming_node():
            for name, content in files.items():
                (self.path / name).parent.mkdir(exist_ok=True)
                (self.path / name).write_bytes(content)
        self.writer = ThreadPoolExecutor(1)
        self.written = []

    def file_of(self, number: int) -> Path:
        """Return the path of part `number` of the weights, counted from 0."""
        return self.path / (f"model_{number}.safetensors" if number else "model.safetensors")

    def map_file(self, number: int, size: int) -> torch.Tensor:
        """Return the bytes of a part's file, which this process maps into its memory only once.

        Raises OSError if there is no room, because a later write without room would kill this process.
        """
        path = self.file_of(number)
        for other in [other for other in self.mapped if not other.exists()]:
            self.unmap(other)
        # On some file systems, space cannot be reserved in files that are open for appending.
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
            found = os.fstat(file.fileno())
            state = found.st_dev, found.st_ino, size
            if found.st_size != size or path not in self.mapped or self.mapped[path][0] != state:
                self.unmap(path)
                file.truncate(size)
                with self.naming_node():
                    os.posix_fallocate(file.fileno(), 0, size)
                buffer = torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
                self.mapped[path] = state, buffer, self.register(buffer)
        return self.mapped[path][1]

    def register(self, buffer: torch.Tensor) -> bool:
        """Register memory with CUDA if this process uses CUDA, so that a GPU copies directly to it.

        Returns whether CUDA has registered the memory.
        """
        if not (torch.cuda.is_initialized() and self.can_register):
            return False
        error = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), len(buffer), 0)
        if not int(error):
            return True
        WeightFolder.can_register = False
        print(f"policy servers: CUDA cannot register memory ({error}), so syncs are slower")
        with contextlib.suppress(RuntimeError):  # CUDA reports the error again at the next kernel.
            torch.ones(1, device="cuda")
        return False

    def unmap(self, path: Path) -> None:
        """Release the memory of a file. CUDA must forget it first, because its address may be used again."""
        _, buffer, is_registered = self.mapped.pop(path, ("", None, False))
        if is_registered:
            torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())

    def write(self, number: int, pack) -> None:
        """Write part `number` of the weights. `pack` is the content of a safetensors file."""
        path = self.file_of(number)
        with self.naming_node(), open(path, "r+b" if path.exists() else "wb") as file:
            file.write(memoryview(pack))
            file.truncate()

    @contextlib.contextmanager
    def naming_node(self):
        """Name the node and the remedy in an error for lack of space."""
        try:
            yield
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            where = f"{self.path} on {socket.gethostname()}; enlarge {self.path.parent} there"
            raise OSError(errno.ENOSPC, f"{error.strerror} for the weights in {where}") from None

    def add(self, number: int, pack) -> None:
        """Write a part in a thread, while the next part is sent. The caller must not change `pack`."""
        self.written.append(self.writer.submit(self.write, number, pack))

    def finish(self, count: int) -> None:
        """Wait until all `count` parts are written. Raise OSError if writing failed.

        Raises RuntimeError if parts are missing because Ray has restarted this process.
        """
        written, self.written = self.written, []
        for write in written:
            write.result()
        if len(written) < count:
            raise RuntimeError(
                f"policy servers: the process that writes {self.path} died during a sync, so weights are "
                "missing there; resume the run"
            )

    def close(self) -> None:
        """Remove the folder. The memory is free once no process maps the files."""
        for path in [path for path in self.mapped if path.parent == self.path]:
            self.unmap(path)
        shutil.rmtree(self.path, ignore_errors=True)


# ---- checksums

WORD = torch.int16
PADDING = 64  # vLLM pads the vocabulary to a multiple of this number of rows.


def weight_sums(weights) -> dict[str, list[int]]:
    """Return [size, size of a row, checksum] of each named tensor.

    The checksum is the sum of the 16-bit words, modulo 2**16. The checksums of shards add up to that of the
    whole tensor, and zeros as padding do not change it.
    """
    sums = {}
    for name, tensor in weights:
        # vLLM replaces weights that it repacks by empty tensors.
        if tensor.itemsize >= WORD.itemsize and tensor.numel():
            words = tensor.reshape(-1).view(WORD)
            # The sum may overflow. A sum of larger integers would need a copy of the tensor.
            total = words.sum(dtype=WORD).item() % 2**16
            row = tensor.shape[-1] if tensor.dim() > 1 else 1
            sums[f"{name} ({tensor.dtype})"] = [tensor.numel(), row, total]
    return sums


def summed(weights, sums: dict):
    """Yield the named tensors, and add what `weight_sums` returns for them to `sums`."""
    for name, tensor in weights:
        sums |= weight_sums([(name, tensor)])
        yield name, tensor


def compare(server: str, sent: dict[str, list[int]], held: list[dict[str, list[int]]], kept=()) -> set[str]:
    """Compare the checksums of what was sent with those of a server's workers.

    Args:
        kept: The weights that must be held and agree, because vLLM kept them as they were sent before.

    Returns:
        The names of the weights whose checksums agree.

    Raises:
        RuntimeError: The server holds other weights than those that were sent.
    """
    same = set()
    for name, (size, row, total) in sent.items():
        parts = [sums[name] for sums in held if name in sums]
        sizes = [part[0] for part in parts]
        totals = [part[2] for part in parts]
        if set(sizes) == {size}:  # copies
            is_same = set(totals) == {total}
        elif size <= sum(sizes) < size + PADDING * row:  # shards, or one padded tensor
            is_same = sum(totals) % 2**16 == total
        else:  # Nothing of this name is held, or shards that overlap.
            continue
        if is_same:
            same.add(name)
    # A server that no longer returns the checksum of a weight has lost it as well.
    lost = [name for name in sent if name in kept and name not in same]
    if lost:
        raise RuntimeError(
            f"{server}: did not load the policy's weights: {len(lost)} of {len(kept)} checksums differ, "
            f"such as that of {lost[0]}; resume the run"
        )
    return same


class WorkerExtension:
    """A method that vLLM adds to its workers."""

    def weight_sums(self) -> dict[str, list[int]]:
        return weight_sums(self.get_model().named_parameters())
