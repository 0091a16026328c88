"""Keeps of a CUDA library only what one kind of GPU needs, in place: python slim_so.py 90 LIBRARY.so ...

A fatbin is a container: magic number, version, size of its head (16 bytes), size of what follows; then
entries, one for each kind of GPU: machine code (kind 2) or PTX (kind 1). Entries of other kinds are taken
out, and what becomes free is zeros, which compress to nothing: no address in the library moves. PTX stays
where a container has no machine code for this GPU.
"""

import struct
import sys
from pathlib import Path

MAGIC = struct.pack("<I", 0xBA55ED50)
PTX, MACHINE_CODE = 1, 2


def entries_of(data: bytearray, start: int, end: int) -> list[tuple[int, int, bytes]]:
    """(kind, architecture, the whole entry) of each entry of a container."""
    entries = []
    while start < end:
        kind, _, head, size = struct.unpack_from("<HHIQ", data, start)
        if kind not in (PTX, MACHINE_CODE) or not head:  # padding
            break
        (architecture,) = struct.unpack_from("<I", data, start + 28)
        entries.append((kind, architecture, bytes(data[start : start + head + size])))
        start += head + size
    return entries


def slim(path: Path, architecture: int) -> None:
    data = bytearray(path.read_bytes())
    kept = 0
    at = data.find(MAGIC)
    while at >= 0:
        _, version, head, size = struct.unpack_from("<IHHQ", data, at)
        start = at + head
        end = start + size
        if version != 1 or head != 16 or end > len(data):  # these bytes are no container
            at = data.find(MAGIC, at + 4)
            continue
        entries = entries_of(data, start, end)
        own = [content for kind, one, content in entries if (kind, one) == (MACHINE_CODE, architecture)]
        if not own:
            own = [content for kind, one, content in entries if kind == PTX and one <= architecture]
        content = b"".join(own)
        data[start:end] = content + bytes(size - len(content))
        if entries:
            struct.pack_into("<Q", data, at + 8, len(content))
        kept += len(content)
        at = data.find(MAGIC, end)
    path.write_bytes(data)
    print(f"{path}: kept {kept / 1e6:.1f} MB of code in {len(data) / 1e6:.1f} MB", flush=True)


for library in sys.argv[2:]:
    slim(Path(library), int(sys.argv[1]))
