"""Each rank receives its own samples: all arrive once and unchanged, with the divisors of the loss."""

from dataclasses import replace

import pytest

from cluster.policy_group import split
from policy import MiniBatch, Sample, mini_batches
from tiny import config_of


def sample(number, length, **changes):
    ids = list(range(number, number + length))
    more = dict(text="a text", result={"reward_score": 0.5}) | changes
    return Sample({"big": "x" * 100}, [number] * (number + 1), ids, [-0.1 * number] * length, **more)


def test_every_sample_goes_to_one_rank_with_lengths_as_equal_as_can_be():
    samples = [sample(number, 5 * number + 1, advantage=1.0) for number in range(5)]
    parts = split([MiniBatch(samples, 55, 6), MiniBatch(samples[:1], 1, 1)], 2)
    first, second = [[s.prompt_ids[0] for s in part[0].samples] for part in parts]
    assert first == [4, 2, 0] and second == [3, 1]
    assert [len(part[1].samples) for part in parts] == [1, 0]
    numbers = [[(batch.num_tokens, batch.num_sequences) for batch in part] for part in parts]
    assert numbers == [[(55, 6), (1, 1)]] * 2


def test_what_arrives_is_what_was_sent_but_for_what_no_update_needs():
    samples = [sample(1, 3, advantage=0.1), sample(2, 2, advantage=-2.0, token_advantages=[0.3, -2.0])]
    sent = [MiniBatch(samples, 9, 3), MiniBatch([], 4, 1), MiniBatch([sample(0, 1)])]
    ((first, empty, looked_at),) = split(sent, 1)
    assert empty == MiniBatch([], 4, 1) and (first.num_tokens, first.num_sequences) == (9, 3)
    for got, was in zip(first.samples + looked_at.samples, samples + sent[2].samples, strict=True):
        assert was.row and was.text and was.result and got == replace(was, row={}, text="", result={})


@pytest.mark.parametrize("advantages, count", [([1.0, 0.0, None], 1), ([0.0, None, 0.0], 0)])
def test_a_mini_batch_has_the_samples_with_a_gradient_and_the_tokens_of_all_with_a_verdict(advantages, count):
    group = [sample(number, number + 1, advantage=value) for number, value in enumerate(advantages)]
    (batch,) = mini_batches([group], config_of())
    if count:
        assert batch == MiniBatch(group[:1], 3, 2)
    else:
        assert batch == MiniBatch(group)
