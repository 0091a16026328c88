"""The toy world's rewards from a discriminative model, with the oracle looking on.

    compute_score_classifier     the classifier's score is the reward
    compute_score_both           two models at once: FAPO by the judge that writes, and a share of the
                                 classifier's score
"""

import math

import compute_score as scores
from toy import toy_world

compute_score_classifier = toy_world.watched(scores.compute_score_discriminative)


@toy_world.watched
async def compute_score_both(
    data_source, solution_str, ground_truth, extra_info, *, prompt, reward_router_addresses,
    reward_router_address=None, reward_model_tokenizer, share=0.5, **judge):  # fmt: skip
    """FAPO's score by `judge`, and `share` times the probability that `classifier` calls the solution sound."""
    result = await scores.compute_score_fapo(
        data_source, solution_str, ground_truth, extra_info, reward_router_addresses["judge"], **judge)
    found = await scores.compute_score_discriminative(
        data_source, solution_str, ground_truth, extra_info, prompt=prompt,
        reward_router_address=reward_router_addresses["classifier"],
        reward_model_tokenizer=reward_model_tokenizer)  # fmt: skip
    sound = 1 / (1 + math.exp(-found["score"]))
    if result["score"] is not None:  # a failure is a status, never a number
        result["score"] += share * sound
    return result | {"classifier": sound}
