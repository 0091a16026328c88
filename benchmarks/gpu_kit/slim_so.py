"""Reduce CUDA libraries in place to the code for one GPU architecture: python slim_so.py 90 LIBRARY.so ...

A fatbin is a container. It starts with a magic number, version 1, the size of its header (16 bytes) and the
size of its content. The content has one entry per architecture, with machine code (kind 2) or PTX (kind 1).
This script removes the entries for other architectures and fills the free space with zeros, which compress
well. No address in the library changes. If a container has no machine code for this GPU, its PTX is kept.
"""

import struct
import sys
from pathlib import Path

START = struct.pack("<IHH", 0xBA55ED50, 1, 16)
PTX, MACHINE_CODE = 1, 2


def entries_of(data: bytearray, start: int, end: int) -> list[tuple[int, int, bytes]]:
    """Return the kind, the architecture and all bytes of each entry of a container."""
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
    at = data.find(START)
    while at >= 0:
        (size,) = struct.unpack_from("<Q", data, at + 8)
        start = at + 16
        end = start + size
        if end > len(data):  # These bytes are not a container.
            at = data.find(START, at + 8)
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
        at = data.find(START, end)
    path.write_bytes(data)
    print(f"{path}: kept {kept / 1e6:.1f} MB of code in {len(data) / 1e6:.1f} MB", flush=True)


for library in sys.argv[2:]:
    slim(Path(library), int(sys.argv[1]))
