"""Samples on their way to the ranks: each rank's own.

    parts = split(batches, 8)                     # in the trainer: the mini-batches of each rank

Rows, texts and results stay behind.
"""

from dataclasses import replace

from policy import MiniBatch


def split(batches: list[MiniBatch], count: int) -> list[list[MiniBatch]]:
    """For each of so many ranks every count-th sample, so that their lengths are as equal as can be."""
    parts = [[] for _ in range(count)]
    for batch in batches:
        bare = []  # what an update needs of them
        for sample in sorted(batch.samples, key=lambda sample: sample.length, reverse=True):
            bare.append(replace(sample, row={}, text="", result={}, turns=[], info={}))
        for rank, part in enumerate(parts):
            part.append(replace(batch, samples=bare[rank::count]))
    return parts
