"""Rewards from a discriminative model in the toy world. The oracle only adds metrics.

compute_score_classifier     the classifier's score is the reward
compute_score_flagged        FAPO's reward, with the classifier as the judge
compute_score_both           FAPO's reward with the generative judge, plus a fraction of the probability
                             that the solution is sound, as the classifier estimates it
"""

import math

import compute_score as scores
from toy import toy_world

compute_score_classifier = toy_world.watched(scores.compute_score_discriminative)


@toy_world.watched
async def compute_score_both(
    data_source,
    solution_str,
    ground_truth,
    extra_info,
    *,
    prompt,
    reward_router_addresses,
    reward_router_address=None,
    reward_model_tokenizer,
    share=0.5,
    **settings,
):
    """Return FAPO's score, plus `share` times the classifier's probability that the solution is sound.

    The reward models named `judge` and `classifier` must be running. `settings` are passed to
    compute_score_fapo.
    """
    result = await scores.compute_score_fapo(
        data_source, solution_str, ground_truth, extra_info, reward_router_addresses["judge"], **settings
    )
    found = await scores.compute_score_discriminative(
        data_source,
        solution_str,
        ground_truth,
        extra_info,
        prompt=prompt,
        reward_router_address=reward_router_addresses["classifier"],
        reward_model_tokenizer=reward_model_tokenizer,
    )
    sound = 1 / (1 + math.exp(-found["score"]))
    if result["score"] is not None:  # a failure is a status, never a number
        result["score"] += share * sound
    return result | {"classifier": sound}


@toy_world.watched
async def compute_score_flagged(
    data_source,
    solution_str,
    ground_truth,
    extra_info,
    *,
    prompt,
    reward_router_address,
    reward_model_tokenizer,
) -> dict:
    """Return FAPO's score. A correct answer counts as flawed if the classifier's score is below 0."""
    result = scores.compute_score(data_source, solution_str, ground_truth)
    result["flawed_positive"] = False
    if result["acc"]:
        found = await scores.compute_score_discriminative(
            data_source,
            solution_str,
            ground_truth,
            extra_info,
            prompt=prompt,
            reward_router_address=reward_router_address,
            reward_model_tokenizer=reward_model_tokenizer,
        )
        result["flawed_positive"] = found["score"] < 0
    if result["flawed_positive"]:
        result["score"] -= 1.0
    return result
