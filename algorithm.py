"""The mathematics of training: results -> advantages -> loss, as pure functions on tensors.

    groups_to_train = set_advantages(groups, options, decode)      # fills in Sample.advantage
    loss, sums = compute_policy_loss(logprobs, old_logprobs, advantages, mask, num_tokens)

The algorithm ends with section 5. Section 6 finds paragraphs, for advantages that differ between tokens. Your
own advantage or loss is a function in your own file (--advantage FILE:NAME, --loss FILE:NAME); section 7 says
what it must do, recipes/advantages.py has worked examples, and docs/algorithms.md compares them.
FAPO's reward (equation 8 of the paper) is computed in compute_score.py.

This file imports nothing from this repository but reward_worker.py and policy.py, to check FILE:NAME.
Not covered: value functions (GAE), a KL term inside the reward.
Tensor names end in their shapes: P prompts, G samples per prompt, B = P * G sequences, T tokens in the
longest response.
"""

import copy
import functools
import inspect
import json
import math
from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from itertools import accumulate, chain

import torch

# In float32, exp() overflows above 88. The loss may still be finite, but its gradient would be NaN.
MAX_LOG_RATIO = 20.0


# ---- 1. rewards -> advantages, within the group of samples of one prompt


def compute_advantages(rewards_P_G: torch.Tensor, divide_by_std: bool = True) -> torch.Tensor:
    """Return (reward - mean) / (sample std + 1e-6) within each group (GRPO, arXiv:2402.03300).

    Args:
        rewards_P_G: The rewards, with one row per prompt. NaN marks a sample without a verdict: its
            advantage is 0, and the mean and std of its group exclude it.
        divide_by_std: Whether to divide by the std. Dr. GRPO (arXiv:2503.20783) does not.

    Returns:
        The advantages. They are 0 in a group with fewer than two verdicts or with only equal rewards.
    """
    known = ~rewards_P_G.isnan()
    count = known.sum(1, keepdim=True)
    mean = rewards_P_G.nan_to_num().sum(1, keepdim=True) / count.clamp(min=1)
    centred = torch.where(known, rewards_P_G - mean, 0.0)
    # If all rewards are equal, the std may be pure rounding error, and dividing by it would amplify it.
    lowest = torch.where(known, rewards_P_G, math.inf).amin(1, keepdim=True)
    highest = torch.where(known, rewards_P_G, -math.inf).amax(1, keepdim=True)
    has_spread = highest - lowest > 1e-9 * torch.maximum(highest.abs(), lowest.abs())
    if divide_by_std:
        # Without this scale, the squares of huge rewards would overflow.
        scale = centred.abs().amax(1, keepdim=True).clamp(min=1)
        variance = (centred / scale).square().sum(1, keepdim=True) / (count - 1).clamp(min=1)
        centred = centred / (scale * variance.sqrt() + 1e-6)
    return torch.where(has_spread, centred, 0.0)


def overlong_penalty(length: int, max_length: int, buffer: int, factor: float) -> float:
    """Return the length penalty of one response (DAPO, arXiv:2503.14476, equation 13).

    The penalty is 0 up to max_length - buffer tokens and falls linearly to -factor at max_length. The
    paper's third case cannot occur, because no response is longer than max_length.

    Raises:
        ValueError: The buffer is not between 1 and max_length.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(
            f"--overlong-buffer {buffer}: must be between 1 and --max-response-length "
            f"{max_length}; pass 0 to turn off the length penalty"
        )
    exceed = length - (max_length - buffer)
    return min(-exceed / buffer * factor, 0.0)


def add_length_penalties(groups: list[list], config) -> None:
    """Add the length penalty to each score. From then on, `reward_score` in Sample.result is the reward.

    Without a verdict, the reward stays None. A failed rollout has no response, and so no penalty.
    """
    if not config.overlong_buffer:
        return
    for sample in chain(*groups):
        if sample.failure:
            continue
        penalty = overlong_penalty(
            len(sample.response_ids),
            config.max_response_length,
            config.overlong_buffer,
            config.overlong_factor,
        )
        reward = sample.result["reward_score"]
        if reward is not None:
            reward += penalty
        about = {"overlong_penalty": penalty, "overlong": penalty < 0}
        info = sample.result["reward_extra_info"] | about
        sample.result = sample.result | {"reward_score": reward, "reward_extra_info": info}


# ---- 2. the inputs of an advantage function


class Groups:
    """The results of P groups of G samples as float64 tensors.

    NaN marks a sample without a verdict, or a result that lacks the number.

    Advantage functions read these attributes:
        rewards_P_G: The score of the reward function plus the length penalty.
        number(key): The value of this key in each result, P x G.
        penalties_P_G: The length penalty, at most 0.
        lengths_P_G, prompt_lengths_P_G: The lengths of responses and prompts in tokens.
        tokens_T: The token indices 0, 1, ... of the longest response.
        samples, infos: Flat lists of each policy.Sample and its result, which is {} without a verdict.
        tensor(values): One number per sample, arranged P x G.
        check_key(key): Raises RuntimeError if no result has this key, for functions that read `infos`.
        decode(ids): The text of these tokens.

    Args:
        groups: Lists of policy.Sample objects that have a `result`.
        decode: A function from token ids to text.
        require_keys: Raise RuntimeError if an advantage needs a key that no result has. In that case, the
            run most likely uses the wrong reward function.
    """

    def __init__(self, groups: list[list], decode, require_keys: bool = False):
        self.shape = len(groups), -1
        self.samples = list(chain(*groups))
        self.decode = decode
        self.require_keys = require_keys
        self.infos = []  # A sample without a verdict has {}.
        rewards = []
        penalties = []
        for sample in self.samples:
            reward = sample.result["reward_score"]
            info = sample.result["reward_extra_info"]
            if reward is None:
                info = {}
            rewards.append(number_or_nan(reward))
            penalties.append(number_or_nan(info.get("overlong_penalty", 0.0)))
            self.infos.append(info)
        self.rewards_P_G = self.tensor(rewards)
        self.penalties_P_G = self.tensor(penalties) + 0 * self.rewards_P_G  # NaN without a verdict
        self.lengths_P_G = self.tensor([len(sample.response_ids) for sample in self.samples])
        self.prompt_lengths_P_G = self.tensor([len(sample.prompt_ids) for sample in self.samples])
        self.tokens_T = torch.arange(max(1, int(self.lengths_P_G.max())))

    def tensor(self, values: list) -> torch.Tensor:
        """Arrange one number per sample in a tensor, P x G."""
        return torch.tensor(values, dtype=torch.float64).unflatten(0, self.shape)

    def number(self, key: str) -> torch.Tensor:
        """Return the value of this key in each result, P x G."""
        self.check_key(key)
        return self.tensor([number_or_nan(info.get(key)) for info in self.infos])

    def check_key(self, key: str) -> None:
        """Raise RuntimeError if require_keys is set and no result has a usable value for this key."""
        infos = [info for info in self.infos if info]
        found = [info for info in infos if not isinstance(info.get(key, ""), (str, dict))]
        if self.require_keys and infos and not found:
            returned = ", ".join(infos[0])
            raise RuntimeError(
                f"--reward-fn: no result has the key {key}, which --advantage "
                f"needs (the keys are {returned}); see docs/algorithms.md"
            )

    def without_length_penalty(self) -> "Groups":
        """Return a copy whose rewards are the scores alone."""
        other = copy.copy(self)
        other.require_keys = False  # The original has already checked the keys.
        other.infos = [info and info | {"overlong_penalty": 0.0} for info in self.infos]
        other.rewards_P_G = other.number("score")
        other.penalties_P_G = 0 * other.rewards_P_G
        return other


def number_or_nan(value) -> float:
    """Return the value as a float, or NaN if it is not a number or its size exceeds 1e300."""
    if isinstance(value, (int, float)) and abs(value) <= 1e300:
        return float(value)
    return math.nan


# ---- 3. one function per advantage


def grpo(groups):
    """Return the reward, normalised within its group (GRPO, and also FAPO)."""
    return compute_advantages(groups.rewards_P_G)


def dr_grpo(groups):
    """Return GRPO's advantage without dividing by the std.

    policy.py divides the loss by a constant, but a loss over sequences (gspo) by the number of sequences.
    """
    return compute_advantages(groups.rewards_P_G, divide_by_std=False)


ADVANTAGES = {"grpo": grpo, "dr_grpo": dr_grpo}


# ---- 4. advantages -> samples


def masked_advantages(groups: Groups, options) -> torch.Tensor:
    """Return the advantages, P x G or P x G x T, with 0 on the padding, which may contain anything."""
    advantages = advantage_function(options)(groups)
    complaint = wrong_shape(advantages, groups)
    if complaint:
        raise ValueError(f"--advantage {options.advantage}: {complaint}")
    if advantages.dim() == 3:
        advantages = advantages.masked_fill(groups.tokens_T >= groups.lengths_P_G[..., None], 0)
    return advantages


def wrong_shape(advantages, groups: Groups) -> str:
    """Return what is wrong with the shape of these advantages, or an empty string."""
    shape, per_sample = tuple(getattr(advantages, "shape", ())), tuple(groups.rewards_P_G.shape)
    per_token = (*per_sample, len(groups.tokens_T))
    if shape in (per_sample, per_token):
        return ""
    return (
        f"the function returned {shape or type(advantages).__name__}, but it must return a tensor of the "
        f"shape {per_sample} or {per_token}"
    )


def drop_verdicts(results: Groups, advantages: torch.Tensor) -> bool:
    """Remove verdicts with a NaN reward or an advantage that is not finite. Return whether there were any."""
    # The loss is computed in float32, where a large number may become infinite.
    has_number_B = advantages.float().isfinite().reshape(len(results.samples), -1).all(1)
    has_number_B &= ~results.rewards_P_G.isnan().flatten()
    has_lost_verdict = False
    for sample, has_number in zip(results.samples, has_number_B.tolist()):
        if sample.result["reward_score"] is not None and not has_number:
            info = {"error": "the advantage is not a finite number"} | sample.result["reward_extra_info"]
            lost = {"reward_score": None, "reward_extra_info": info, "status": "no_verdict"}
            sample.result = sample.result | lost
            has_lost_verdict = True
    return has_lost_verdict


def set_advantages(
    groups: list[list], options, decode, drop_zero_advantages=False, require_keys=False
) -> list[list]:
    """Set the advantage of each sample, or of each of its tokens, and return the groups to train on.

    A sample without a verdict keeps the advantage None. If a value that the advantage needs is not a number,
    the sample loses its verdict, and the other samples of its group are normalised without it.

    Args:
        groups: Lists of policy.Sample objects that have a `result`.
        options: settings.PolicyOptions.
        decode: A function from token ids to text.
        drop_zero_advantages: Drop groups without a learning signal, and leave their advantages unset.
        require_keys: Check that each key the advantage needs occurs in at least one result.

    Raises:
        RuntimeError: require_keys is set, and one of these keys occurs in no result.
        ValueError: The function of --advantage returns a wrong shape.
    """
    results = Groups(groups, decode, require_keys)
    advantages = masked_advantages(results, options)
    while drop_verdicts(results, advantages):
        results = Groups(groups, decode)
        advantages = masked_advantages(results, options)

    has_signal_P = [True] * len(groups)
    if drop_zero_advantages:
        has_signal_P = has_learning_signal(results, options)
    groups_to_train = []
    for group, advantages_G, has_signal in zip(groups, advantages, has_signal_P):
        if has_signal:
            groups_to_train.append(group)
        for sample, advantage in zip(group, advantages_G):
            sample.advantage, sample.token_advantages = None, []  # An earlier call may have set them.
            if sample.result["reward_score"] is None or not has_signal:
                continue
            if advantage.dim() == 0:
                sample.advantage = advantage.item()
            else:
                sample.token_advantages = advantage[: len(sample.response_ids)].tolist()
                sample.advantage = sample.token_advantages[-1]
    return groups_to_train


def has_learning_signal(groups: Groups, options) -> torch.Tensor:
    """Return, for each group, whether any advantage differs from 0 (DAPO's dynamic sampling).

    As in DAPO, the length penalty does not count: different lengths alone are not a learning signal.
    """
    advantages = masked_advantages(groups.without_length_penalty(), options).nan_to_num()
    return advantages.abs().flatten(1).amax(1) > 1e-6


# ---- 5. advantages -> loss


def clip_loss(logprobs, log_ratio, advantages, mask, clip_low=0.2, clip_high=0.28, clip_c=10.0):
    """Compute PPO's clipped loss with DAPO's clip-higher and dual clip (arXiv:1912.09729)."""
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss_B_T = torch.maximum(unclipped, clipped)
    bound = -advantages * clip_c  # The dual clip bounds the ratio of tokens with a negative advantage.
    loss_B_T = torch.where(advantages < 0, torch.minimum(loss_B_T, bound), loss_B_T)
    return loss_B_T, loss_B_T != unclipped


def gspo_loss(logprobs, log_ratio, advantages, mask, clip_low=3e-4, clip_high=4e-4):
    """Compute the loss of GSPO-token (arXiv:2507.18071), which has no dual clip."""
    sequence_log_ratio = log_ratio.sum(1, keepdim=True) / lengths_of(mask)
    # The value is the sequence's log-ratio, but each token keeps the gradient of its own log-probability.
    log_ratio = sequence_log_ratio.detach() + log_ratio - log_ratio.detach()
    return clip_loss(logprobs, log_ratio, advantages, mask, clip_low, clip_high, clip_c=math.inf)


gspo_loss.over_sequences = True  # The mean is over each sequence's tokens first, and then over sequences.


def cispo_loss(logprobs, log_ratio, advantages, mask, clip_low=1.0, clip_high=4.0):
    """Compute CISPO's loss (arXiv:2506.13585): log-probabilities weighted by the detached clipped ratio.

    Unlike a clipped loss, this loss gives every token a gradient. There is no dual clip. By default, the
    ratio is clipped to 0 .. 5, as in ScaleRL (arXiv:2510.13786).
    """
    ratio = log_ratio.exp().detach()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -advantages * weight * logprobs, weight != ratio


LOSSES = {"clip": clip_loss, "gspo": gspo_loss, "cispo": cispo_loss}
CLIP_SETTINGS = ("clip_low", "clip_high", "clip_c")  # Each has a flag. No shipped loss has other settings.


def compute_policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    num_tokens: int,
    *,
    num_sequences: int | None = None,
    loss: str | Callable = "clip",
    rollout_logprobs: torch.Tensor | None = None,
    tis_cap: float | None = None,
    **settings,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the policy loss of a micro-batch, and sums for the metrics.

    The loss is a mean over the tokens of the whole mini-batch, or over its sequences if the loss function has
    a true attribute `over_sequences` (gspo). So the losses of micro-batches and ranks add up to the same
    number, however the samples are split. Log-probabilities of 16 bits are widened to float32.

    Args:
        logprobs: Log-probabilities of the sampled tokens under the current policy, B x T.
        old_logprobs: Log-probabilities of the sampled tokens before the first update of this step, B x T.
        advantages: One number per sequence (B) or per token (B x T).
        mask: True on the tokens that the policy wrote, B x T.
        num_tokens: Number of tokens that the policy wrote in the whole mini-batch.
        num_sequences: Number of sequences in the whole mini-batch, by default B, for a mean over sequences.
        loss: A name in LOSSES, or a function (see loss_function).
        rollout_logprobs: The log-probabilities that the sampler reported, B x T; needed for tis_cap.
        tis_cap: Truncated importance sampling: each token is weighted by min(exp(old - rollout), tis_cap).
        settings: Arguments of the loss, such as clip_low, clip_high and clip_c.

    Returns:
        The loss, and sums (tensors) to add up over micro-batches, such as the number of clipped tokens. That
        number is absent if the loss does not clip.
    """
    compute = LOSSES.get(loss, loss)
    if advantages.dim() == 1:
        advantages = advantages[:, None]
    logprobs, old_logprobs, mask = widened(logprobs, old_logprobs.detach(), mask)
    logprobs = torch.where(mask > 0, logprobs, 0.0)  # The padding may contain anything, even NaN.
    log_ratio = torch.where(mask > 0, logprobs - old_logprobs, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    kl_B_T = (log_ratio.exp() - 1 - log_ratio).detach()
    sums = {"approx_kl_sum": (kl_B_T * mask).sum(), "loss_tokens": mask.sum()}
    loss_B_T = compute(logprobs, log_ratio, advantages, mask, **settings)
    if isinstance(loss_B_T, tuple):
        loss_B_T, is_clipped = loss_B_T
        sums["clipped_tokens"] = (is_clipped * mask).sum()
    if tis_cap is not None:
        weight = torch.where(mask > 0, old_logprobs - rollout_logprobs, 0.0).exp()
        sums["tis_capped_tokens"] = ((weight > tis_cap) * mask).sum()
        weight = weight.clamp(max=tis_cap)
        sums["tis_sum"] = (weight * mask).sum()
        loss_B_T = loss_B_T * weight
    if getattr(compute, "over_sequences", False):
        loss_B = (loss_B_T * mask).sum(1) / lengths_of(mask)[:, 0]
        return loss_B.sum() / (num_sequences or len(mask)), sums
    return (loss_B_T * mask).sum() / num_tokens, sums


def widened(*tensors):
    """Return the tensors in the first one's dtype, or in float32 if that is wider: 1.0003 is 1 in bf16."""
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    return [tensor.to(wide) for tensor in tensors]


def lengths_of(mask):
    """Return the number of tokens of each sequence, at least 1, as B x 1."""
    return mask.sum(1, keepdim=True).clamp(min=1)


def compute_kl_loss(logprobs, reference_logprobs, mask, num_tokens):
    """Estimate the KL divergence from the reference (GRPO, eq. 4): sum(exp(d) - d - 1) / num_tokens.

    d is the reference's log-probability minus the policy's. The value is unbiased, but as in GRPO, the
    gradient is not that of the divergence. Shapes, `num_tokens` and 16-bit inputs are as in
    compute_policy_loss.
    """
    mask = mask > 0
    logprobs, reference_logprobs = widened(logprobs, reference_logprobs)
    difference = torch.where(mask, reference_logprobs - logprobs, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return ((difference.exp() - difference - 1) * mask).sum() / num_tokens


# ---- 6. locating paragraphs in the tokens of a response


def starts_of(sample, count: int | None, decode) -> list[int]:
    """Return the token indices at which the first `count` paragraphs (or turns) of a sample begin.

    If `count` is None, these are the indices of all of them.
    """
    if sample.has_turns:
        lengths = [turn["tokens"] for turn in sample.turns]
        return list(accumulate(lengths[:-1], initial=0))[:count]
    places = paragraph_starts(sample.text)[:count]
    return tokens_before(places, sample.text, sample.response_ids, decode)


def paragraph_starts(text: str) -> list[int]:
    """Return where each paragraph begins. compute_score.split_paragraphs finds the same paragraphs."""
    starts = []
    end = 0
    for part in text.split("\n\n"):
        if part.strip():
            starts.append(end + len(part) - len(part.lstrip()))
        end += len(part) + 2
    return starts


def tokens_before(places: list[int], text: str, ids: list[int], decode) -> list[int]:
    """Return how many tokens of a response precede each place in its text.

    A token that spans a place belongs to the text after it. The text is not re-encoded, because that could
    yield different tokens. Instead, a binary search finds the first token at which the decoded text extends
    beyond the place. Each search starts near the previous place, so that it decodes few tokens.

    Args:
        places: Character indices, in ascending order.
        text: The text of all `ids`.
        ids: The tokens of the response.
        decode: A function from token ids to text.
    """
    counts = []
    low, last = 0, len(ids) - 1
    first, offset = 0, 0  # Decoding starts with token `first`, whose text starts at `offset`.

    def reaches_beyond(token: int) -> bool:
        """Return whether the text up to this token, which is included, extends beyond the place."""
        decoded = decode(ids[first : token + 1])
        return decoded.startswith(before) and decoded != before

    for place in places:
        before = text[offset:place]
        reach = 8
        while low + reach < last and not reaches_beyond(low + reach):
            low += reach + 1
            reach *= 2
        high = min(low + reach, last)
        low = bisect_left(range(high), True, low, high, key=reaches_beyond)
        counts.append(low)
        first, offset = later_start(first, offset, low, text, ids, decode)
    return counts


def later_start(first: int, offset: int, end: int, text: str, ids: list[int], decode) -> tuple[int, int]:
    """Return a token shortly before `end` at which decoding can start, and the offset of this token's text.

    Decoders drop a leading space, and one character may consist of several tokens. A start is therefore valid
    only if decoding from there gives the same text as decoding from `first`. Otherwise, `first` is returned.
    """
    decoded = decode(ids[first:end])
    for context in (8, 32):
        near = decode(ids[end - context : end])
        fits = near.strip() and near[0] != "\ufffd" and decoded.endswith(near)
        if end - context > first and fits and text.startswith(decoded, offset):
            return end - context, offset + len(decoded) - len(near)
    return first, offset


# ---- 7. functions from your own files


def advantage_function(options) -> Callable:
    """Return the function of --advantage with its settings, so that only the Groups are missing.

    The function gets Groups and the settings in --advantage-kwargs. It returns one advantage per sample (P x
    G) or per token (P x G x T). A sample without a verdict has NaN in `rewards_P_G`. The statistics of its
    group must exclude this sample, and its own advantage should be NaN.

    Raises:
        ValueError: The function cannot be loaded.
    """
    return partial(named_function("advantage", options.advantage), **json.loads(options.advantage_kwargs))


def loss_function(options) -> Callable:
    """Return the function of --loss with its settings, so that only the tensors are missing.

    The function gets four B x T tensors and its settings: log-probabilities, their differences from the old
    log-probabilities, advantages and the mask of the policy's tokens. It returns the loss of each token or,
    if it clips, a pair: the losses and whether each token was clipped. The loss of a sequence must not
    depend on other sequences, because any split of a mini-batch must give the same sum. The settings are
    those in --loss-kwargs, and --clip-low, --clip-high and --clip-c if set.

    Raises:
        ValueError: The function cannot be loaded.
    """
    settings = {}
    for name in CLIP_SETTINGS:
        value = getattr(options, name)
        if value is not None:
            settings[name] = value
    function = named_function("loss", options.loss)
    compute = partial(function, **settings | json.loads(options.loss_kwargs))
    compute.over_sequences = getattr(function, "over_sequences", False)
    return compute


def has_gradient_at_zero(options) -> bool:
    """Return whether the function of --loss has a gradient at advantage 0. A divergence has one, for example.

    The ratios differ from 1, because the gradient of a divergence from the old policy vanishes at 1.
    """
    logprobs = torch.linspace(-6, -1, 8).reshape(2, 4).requires_grad_()
    old, zeros, mask = torch.full((2, 4), -4.0), torch.zeros(2, 4), torch.ones(2, 4)
    loss, _ = compute_policy_loss(logprobs, old, zeros, mask, num_tokens=8, loss=loss_function(options))
    if not loss.requires_grad:
        return False
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return gradient.abs().sum().item() > 0


@functools.cache  # The file is loaded once per process.
def named_function(field: str, name: str) -> Callable:
    """Return a shipped advantage or loss by its name, or load FILE:NAME. Raises ValueError."""
    shipped = {"advantage": ADVANTAGES, "loss": LOSSES}[field]
    if name in shipped:
        return shipped[name]
    if ":" not in name:
        raise ValueError(f"--{field} {name}: must be {', '.join(shipped)} or FILE.py:NAME")
    from reward_worker import load_in_this_process

    return load_in_this_process(field, name)


def check_functions(options) -> None:
    """Call the functions of --advantage and --loss on small examples. Raises ValueError with the reason."""
    from reward_worker import error_line

    named_function.cache_clear()  # The files may have changed since an earlier run in this process.
    check_clip_settings(options)
    checks = {"advantage": check_advantage, "loss": check_loss}
    for field, check in checks.items():
        name = getattr(options, field)
        function = named_function(field, name)
        try:
            complaint = check(options)
        except Exception as error:
            code = getattr(inspect.unwrap(function), "__code__", None)  # Callable objects have none.
            complaint = error_line(error, code.co_filename if code else "")
        if complaint:
            raise ValueError(f"--{field} {name}: on a small example, {complaint}; see docs/algorithms.md")


def check_clip_settings(options) -> None:
    """Raise ValueError if --loss lacks a clip setting that is set, or --loss-kwargs bypasses its check."""
    from reward_worker import flag

    function = named_function("loss", options.loss)
    for name in CLIP_SETTINGS:
        if name in json.loads(options.loss_kwargs) and options.loss in LOSSES:
            raise ValueError(f"--loss-kwargs: pass {flag(name)} instead of {name}")
        if getattr(options, name) is not None and not accepts(function, name):
            raise ValueError(
                f"{flag(name)}: the loss {options.loss} has no setting {name}; omit {flag(name)}"
            )


def accepts(function: Callable, name: str) -> bool:
    """Return whether a function takes an argument of this name."""
    try:
        inspect.signature(function).bind_partial(**{name: None})
    except TypeError:
        return False
    except ValueError:  # A compiled function may have no signature.
        pass
    return True


def check_advantage(options) -> str:
    """Return why an advantage breaks the contract of `advantage_function`, or an empty string.

    The example has the keys of FAPO's results. A function that needs others is checked only by the run.
    """
    size = options.group_size
    # The mean of the rewards is not 0, so that a missing verdict which counts as 0 changes it.
    penalty = {"overlong_penalty": -0.25} if options.overlong_buffer else {}
    right = dict(score=1.0, acc=True, flawed_positive=False, first_wrong=-1, step_scores=[1.0, 1.0])
    wrong = dict(score=0.0, acc=False, flawed_positive=False, first_wrong=1, step_scores=[1.0, 0.0])
    group = ([right, wrong | penalty] * size)[:size]
    compute = advantage_function(options)
    found = []
    for infos in (group, group, [*group, {"score": None}]):
        groups = example_groups(infos)
        try:
            advantages = compute(groups)
        except KeyError as error:
            if error.args[0] in right:
                raise
            return ""
        complaint = wrong_shape(advantages, groups)
        if complaint:
            return complaint
        found.append(advantages[:, :size])
    first, second, with_silent = found
    is_random = not torch.equal(first.nan_to_num(), second.nan_to_num())
    if not is_random and not torch.allclose(first, with_silent, equal_nan=True):
        return "a sample without a verdict (NaN) changes the advantages of its group; exclude such samples"
    return ""


def example_groups(infos: list[dict]) -> Groups:
    """Return two equal groups whose samples have these results and two paragraphs."""
    from policy import Sample

    row = {
        "data_source": "example",
        "prompt": [{"role": "user", "content": "1+1=?"}],
        "reward_model": {"ground_truth": "2"},
        "extra_info": {},
    }
    groups = []
    for _ in range(2):
        group = []
        for info in infos:
            result = {"reward_score": info["score"], "reward_extra_info": dict(info), "status": "ok"}
            group.append(Sample(row, [1, 1], [*b"1\n\n2"], [-1.0] * 4, "1\n\n2", result=result))
        groups.append(group)
    return Groups(groups, lambda ids: bytes(ids).decode())


def check_loss(options) -> str:
    """Return why a loss breaks the contract of `loss_function`, or an empty string."""
    function = loss_function(options)
    generator = torch.Generator().manual_seed(0)
    logprobs, log_ratio = torch.randn(2, 3, 4, generator=generator)
    log_ratio.requires_grad_()
    logprobs = logprobs + log_ratio
    advantages = torch.tensor([[1.0], [-1.0], [2.0]]).repeat(1, 4)
    mask = torch.tensor([[1.0, 1, 1, 1], [1, 0, 1, 0], [1, 1, 1, 0]])
    inputs = [logprobs * mask, log_ratio * mask, advantages, mask]

    def call(*tensors):
        found = function(*tensors)
        return found if isinstance(found, tuple) else (found,)

    parts = call(*inputs)
    loss_B_T = parts[0]
    if len(parts) > 2 or any(getattr(part, "shape", None) != mask.shape for part in parts):
        return "the function must return a tensor of the shape of its inputs (B x T), or a pair of them"
    if not loss_B_T.requires_grad or not (loss_B_T * mask).isfinite().all():
        return "the loss of a token has no gradient or is not finite"
    has_gradient_at_zero(options)  # An exception at advantage 0 should end the run here.
    if not torch.equal(call(*inputs)[0], loss_B_T):
        return ""  # The loss draws random numbers, so two calls cannot be compared.
    for row, own_T in enumerate(mask):
        length = 1 + own_T.nonzero().max()
        alone = call(*[tensor[row : row + 1, :length] for tensor in inputs])[0]
        apart_T = (alone - loss_B_T[row, :length]) * own_T[:length]
        if not apart_T.abs().max() <= 1e-6:  # This is also true for NaN, as of a std over one sequence.
            return (
                "the loss of a sequence depends on the other sequences of its micro-batch or on the padding, "
                "so that the result would depend on the split into micro-batches"
            )
    return ""
