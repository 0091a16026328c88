"""Checksums of weights: the trainer computes them when it sends the weights, vLLM's workers after loading.

    sent = {}
    for name, tensor in summed(weights, sent): ...      # fills `sent`
    kept = compare("server 0", sent, held)              # `held`: one result per worker of a vLLM server
    compare("server 0", sent, held, kept)               # raises RuntimeError if a sync was lost

A server with `--worker-extension-cls weight_sums.WorkerExtension` returns its workers' checksums for POST
/collective_rpc {"method": "weight_sums"}. vLLM's workers import this file, so it imports nothing from this
repository. Not covered: weights that vLLM does not keep as they are sent. It merges some (queries, keys and
values; gate and up projections; experts), repacks all linear layers on a CPU, and may quantize.
"""

import torch

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
        if tensor.is_floating_point() and tensor.itemsize >= WORD.itemsize and tensor.numel():
            words = tensor.detach().reshape(-1).view(WORD)
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
        size_held = sum(part[0] for part in parts)
        if parts and all(part[0] == size for part in parts):  # copies
            is_same = all(part[2] == total for part in parts)
        elif size <= size_held < size + PADDING * row:  # shards, or one padded tensor
            is_same = sum(part[2] for part in parts) % 2**16 == total
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
