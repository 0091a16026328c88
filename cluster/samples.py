"""Samples on their way to the ranks: each rank's own, as bytes.

    parts = split(batches, 8)                     # in the trainer: the mini-batches of each rank
    batches = unpack(pack(parts[3]))              # in rank 3

Rows, texts and results stay behind. One core of the trainer packs all tokens of a step: hence marshal, which
knows lists and numbers alone. Both sides have the same Python, or Ray would not have connected them.
"""

import marshal
from dataclasses import replace
from operator import attrgetter

from policy import MiniBatch, Sample

FIELDS = ("prompt_ids", "response_ids", "rollout_logprobs", "advantage", "token_advantages")
FORMAT = 2  # the newest that looks for no object that occurs twice


def split(batches: list[MiniBatch], count: int) -> list[list[MiniBatch]]:
    """For each of so many ranks every count-th sample, so that their lengths are as equal as can be."""
    parts = [[] for _ in range(count)]
    for batch in batches:
        ordered = sorted(batch.samples, key=lambda sample: sample.length, reverse=True)
        for rank, part in enumerate(parts):
            part.append(replace(batch, samples=ordered[rank::count]))
    return parts


def pack(batches: list[MiniBatch]) -> bytes:
    """What an update needs of them."""
    content = []
    for batch in batches:
        samples = list(map(attrgetter(*FIELDS), batch.samples))
        content.append([samples, batch.num_tokens, batch.num_sequences])
    return marshal.dumps(content, FORMAT)


def unpack(packed: bytes) -> list[MiniBatch]:
    """What `pack` was given: of the samples FIELDS."""
    batches = []
    for content, num_tokens, num_sequences in marshal.loads(packed):
        samples = []
        for values in content:
            samples.append(Sample({}, **dict(zip(FIELDS, values))))
        batches.append(MiniBatch(samples, num_tokens, num_sequences))
    return batches
