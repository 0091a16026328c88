"""Samples on their way to the ranks: each rank's own, as columns of numbers instead of objects.

    parts = split(batches, 8)                     # in the trainer: the mini-batches of each rank
    columns = pack(parts[3])                      # arrays, which Ray moves without copying them in Python
    batches = unpack(columns)                     # in rank 3

Objects would cost a rank ten times as much, and each of them all of the others' samples as well.
"""

from array import array
from dataclasses import replace
from itertools import islice

import numpy

from policy import MiniBatch, Sample


def split(batches: list[MiniBatch], count: int) -> list[list[MiniBatch]]:
    """For each of so many ranks every count-th sample, so that their lengths are as equal as can be."""
    parts = [[] for _ in range(count)]
    for batch in batches:
        ordered = sorted(batch.samples, key=lambda sample: sample.length, reverse=True)
        for rank, part in enumerate(parts):
            part.append(replace(batch, samples=ordered[rank::count]))
    return parts


def pack(batches: list[MiniBatch]) -> list[numpy.ndarray]:
    """Three numbers of each mini-batch, two lengths of each sample, and three columns of tokens."""
    sizes = array("q")
    lengths = array("i")
    tokens = array("i")
    logprobs = array("f")
    advantages = array("f")
    for batch in batches:
        sizes.fromlist([len(batch.samples), batch.num_tokens, batch.num_sequences])
        for sample in batch.samples:
            lengths.fromlist([len(sample.prompt_ids), len(sample.response_ids)])
            tokens.fromlist(sample.prompt_ids)
            tokens.fromlist(sample.response_ids)
            logprobs.fromlist(sample.rollout_logprobs)
            if sample.token_advantages:
                advantages.fromlist(sample.token_advantages)
            else:
                advantages.extend(array("f", [sample.advantage or 0.0]) * len(sample.response_ids))
    return [numpy.asarray(column) for column in (sizes, lengths, tokens, logprobs, advantages)]


def unpack(columns: list[numpy.ndarray]) -> list[MiniBatch]:
    """What `pack` was given, as far as an update needs it."""
    sizes, lengths, tokens, logprobs, advantages = columns
    samples = []
    start = 0  # of a sample's tokens
    first = 0  # of its response's in the other columns
    for prompt, response in lengths.reshape(-1, 2).tolist():
        middle = start + prompt
        end = middle + response
        last = first + response
        sample = Sample({}, tokens[start:middle].tolist(), tokens[middle:end].tolist())
        sample.rollout_logprobs = logprobs[first:last].tolist()
        sample.token_advantages = advantages[first:last].tolist()
        samples.append(sample)
        start = end
        first = last
    rest = iter(samples)
    batches = []
    for count, num_tokens, num_sequences in sizes.reshape(-1, 3).tolist():
        batches.append(MiniBatch(list(islice(rest, count)), num_tokens, num_sequences))
    return batches
