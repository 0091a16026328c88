"""The policy's update: comparison with a naive loss, invariances, and what must not change anything."""

import copy
import dataclasses
import functools
import json
import math
import random
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import CheckpointException
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicLayer

import causal_lm
import policy as policy_file
from toy import warm_start
from policy import Policy, Sample, split_mini_batches
from rollout import check_sampling, model_files
from tiny import (
    CPU,
    a_step,
    config_of,
    groups_of,
    policy_of,
    read_again,
    roll_out,
    weights_of,
    with_sgd,
    write_model,
)


def updated(model, samples, lr=1e-2, **changes):
    """Return the metrics, and the weights after one update with plain SGD, which shows the gradients."""
    policy = with_sgd(policy_of(model, **changes))
    metrics = policy.update(groups_of(samples), lr=lr)
    return weights_of(policy), metrics


def test_update_is_the_plain_gradient_of_the_loss(model):
    """Compare with the loss in its naive form: full logits, no micro-batches, no skipped samples."""
    samples, clone = a_step(model), copy.deepcopy(model)
    got, metrics = updated(model, samples, max_grad_norm=1e9)
    num_tokens = sum(len(sample.response_ids) for sample in samples if sample.advantage is not None)
    loss = 0.0
    for sample in samples:
        logits = clone(torch.tensor([sample.prompt_ids + sample.response_ids])).logits[
            0, len(sample.prompt_ids) - 1 : -1
        ]
        logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(sample.response_ids)[:, None])[:, 0]
        loss = loss - (sample.advantage or 0.0) * (logprobs - logprobs.detach()).exp().sum() / num_tokens
    loss.backward()
    expected = torch.cat([(p - 1e-2 * p.grad).detach().flatten() for p in clone.parameters()])
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert (expected - before).abs().max() > 1e-5
    assert torch.allclose(got, expected, atol=2e-8)
    assert metrics["actor/loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert metrics["rollout/logprob_diff"] < 1e-5 and metrics["actor/updates"] == 1
    # A longer gradient is shortened to the maximum norm.
    limit = metrics["actor/grad_norm"] / 4
    moved = updated(model, samples, max_grad_norm=limit)[0] - before
    assert moved.norm().item() == pytest.approx(1e-2 * limit, rel=1e-2)


@pytest.mark.parametrize("name, value", [("scale", "null"), ("scale", "1"), ("tis_cap", "1"), ("loss", "1")])
def test_a_loss_gets_its_settings_as_given(model, tmp_path, name, value):
    """With these settings, the user's loss equals the default loss, whose ratios are not clipped here."""
    code = f"return -advantages * log_ratio.exp() * ({name} or 1)"
    file = tmp_path / f"own_{name}.py"  # With pytest 8, these folders have the same name.
    file.write_text(f"def mine(logprobs, log_ratio, advantages, mask, {name}=0.5):\n    {code}\n")
    samples = a_step(model)
    got, _ = updated(model, samples, loss=f"{file}:mine", loss_kwargs=f'{{"{name}": {value}}}')
    assert torch.equal(got, updated(model, samples)[0])


def test_a_loss_with_a_divergence_is_also_applied_to_samples_with_advantage_0(model, tmp_path):
    """In the second update, the penalty has a gradient in a group without a learning signal."""
    file = tmp_path / "own.py"
    file.write_text(
        "def penalised(logprobs, log_ratio, advantages, mask, beta=1.0):\n"
        "    return -advantages * log_ratio.exp() + beta * (log_ratio.exp() - 1 - log_ratio)\n"
    )
    samples = off_policy(model, with_prefixes=False)[:8]
    options = dict(loss=f"{file}:penalised", mini_batch_size=1)
    found = []
    for advantage in (0.0, 1e-30):
        for sample in samples[4:]:
            sample.advantage = advantage
        found.append(updated(model, samples, **options))
    assert found[0][1]["actor/updates"] == 2
    assert found[0][1] == found[1][1] and torch.equal(found[0][0], found[1][0])
    samples[4].advantage = None
    assert updated(model, samples, **options)[1] != found[0][1]  # A sample without a verdict is excluded.
    for sample in samples[4:]:
        sample.advantage = 0.0
    for beta, num_updates in ((0, 1), (-1, 2)):
        loss_kwargs = json.dumps({"beta": beta})
        assert updated(model, samples, loss_kwargs=loss_kwargs, **options)[1]["actor/updates"] == num_updates


ALGORITHMS = [
    dict(entropy_coef=0.01),
    dict(advantage="dr_grpo", max_response_length=12),
    dict(loss="gspo"),
    dict(loss="cispo"),
    dict(tis_cap=1.01),
    dict(tis_cap=1.01, loss="gspo"),
]


def set_prefix(sample, length, advantage):
    """Give the first tokens of a sample a separate advantage."""
    rest = len(sample.response_ids) - length
    if sample.advantage is not None:
        sample.token_advantages = [advantage] * length + [sample.advantage] * rest


def off_policy(model, with_prefixes=True):
    """Return a step with samples from slightly different weights.

    Some have a separate advantage before an error. The losses differ on such samples.
    """
    samples, rng = a_step(model), random.Random(0)
    for sample in samples:
        sample.rollout_logprobs = [x + rng.gauss(0, 0.02) for x in sample.rollout_logprobs]
        if with_prefixes:
            set_prefix(sample, rng.randint(0, len(sample.response_ids) - 1), rng.choice((0.0, 0.5)))
    return samples


@pytest.mark.parametrize("changes", ALGORITHMS, ids=str)
def test_update_does_not_depend_on_micro_batches(model, changes):
    """There are two mini-batches, and in the second one the ratio is no longer 1."""
    samples, changes = off_policy(model), changes | dict(mini_batch_size=2)
    whole, metrics = updated(model, samples, max_tokens_per_micro_batch=10_000, **changes)
    parts, part_metrics = updated(model, samples, max_tokens_per_micro_batch=1, **changes)
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert (whole - before).abs().max() > 1e-5
    assert torch.allclose(whole, parts, atol=2e-7)
    for key in metrics:
        assert part_metrics[key] == pytest.approx(metrics[key], rel=1e-4, abs=1e-6), key


def test_sums_for_metrics_are_read_once_per_mini_batch(model, monkeypatch):
    """Reading a number would make the CPU wait for a GPU after each micro-batch.

    A truth value is read in each pass, by transformers, to see whether sequences are packed.
    """
    read, found = [], []

    def watch(name):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda tensor: read.append(name) or original(tensor))

    samples = off_policy(model)
    for name in ("item", "tolist", "__float__"):
        watch(name)
    for max_tokens in (10_000, 1):
        policy = policy_of(model, mini_batch_size=2, max_tokens_per_micro_batch=max_tokens)
        read.clear()
        policy.update(groups_of(samples), lr=0.0)
        found.append(Counter(read))
    assert found[0] == found[1] and found[0]["__float__"] > 0


@pytest.mark.slow
def test_a_prefix_has_an_advantage_of_its_own(model):
    """The gradient is the sum of the gradients of the prefixes alone and of the rests alone.

    A sample with advantage 0 after its prefix still has a gradient.
    """
    before = torch.cat([p.detach().flatten() for p in model.parameters()])

    def step(prefix_advantage, advantage):
        samples = off_policy(model, with_prefixes=False)
        for number, sample in enumerate(samples):
            sample.advantage = advantage
            set_prefix(sample, number % len(sample.response_ids), prefix_advantage)
        return updated(model, samples, max_grad_norm=1e9)[0] - before

    both, first, second = step(0.5, -1.0), step(0.5, 0.0), step(0.0, -1.0)
    assert torch.allclose(both, first + second, atol=3e-7)
    assert first.abs().max() > 1e-5 < second.abs().max()
    assert torch.allclose(step(-1.0, -1.0), step(0.0, -1.0) + step(-1.0, 0.0), atol=3e-7)


def test_dr_grpo_divides_by_the_longest_length_there_could_be(model):
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    options = dict(max_grad_norm=1e9, max_response_length=20)
    token_mean, constant = (
        updated(model, a_step(model), advantage=name, **options)[0] - before for name in ("grpo", "dr_grpo")
    )
    scored = [len(sample.response_ids) for sample in a_step(model) if sample.advantage is not None]
    assert torch.allclose(constant, token_mean * sum(scored) / (20 * len(scored)), atol=1e-7)
    assert constant.abs().max() > 1e-5


def test_a_loss_over_sequences_keeps_its_divisor_with_dr_grpo(model):
    options = dict(loss="gspo", max_grad_norm=1e9, max_response_length=20)
    losses = [updated(model, a_step(model), advantage=name, **options) for name in ("grpo", "dr_grpo")]
    assert torch.equal(losses[0][0], losses[1][0]) and losses[0][1] == losses[1][1]


def check_divisor(model, **options):
    """Samples with advantage 0 have no gradient but count in the divisor.

    Samples without a verdict do not count.
    """

    def norm(*advantages):
        samples = roll_out(model, [[5, 6, 7]], group_size=4, length=6)
        for sample, advantage in zip(samples, advantages):
            sample.advantage = advantage
        return updated(model, samples, **options)[1]["actor/grad_norm"]

    of_four, of_two = norm(1.0, -1.0, 0.0, 0.0), norm(1.0, -1.0, None, None)
    assert of_four > 1e-3 and of_two == pytest.approx(2 * of_four, rel=1e-4)


def test_dr_grpo_counts_every_sample_with_a_verdict(model):
    check_divisor(model, advantage="dr_grpo", max_response_length=20)


@pytest.mark.parametrize("loss", ["clip", "gspo"])
def test_the_loss_counts_every_sample_with_a_verdict(model, loss):
    check_divisor(model, loss=loss)


@pytest.mark.parametrize("loss", ["clip", "gspo"])
def test_entropy_and_kl_keep_their_weight_whatever_the_loss_is_divided_by(model, tmp_path, loss):
    """With the constant length of Dr. GRPO, the whole gradient is smaller, but its direction is the same.

    A loss over sequences keeps its divisor, and so do the two other terms.
    """
    moved_away(model).save_pretrained(tmp_path)  # this is the reference
    samples, before = off_policy(model), weights_of(policy_of(model))
    both = dict(entropy_coef=0.1, kl_coef=1.0)

    def gradient(**changes):
        settings = changes | dict(loss=loss, max_grad_norm=1e9, max_response_length=1000)
        policy = with_sgd(policy_of(copy.deepcopy(model), model=str(tmp_path), **settings))
        policy.update(groups_of(samples), lr=1.0)
        return weights_of(policy) - before

    moved, constant = (gradient(advantage=name, **both) for name in ("grpo", "dr_grpo"))
    assert (moved - gradient()).abs().max() > 1e-4
    lengths = [len(sample.response_ids) for sample in samples if sample.advantage is not None]
    ratio = 1.0
    if loss == "clip":
        ratio = sum(lengths) / (1000 * len(lengths))
    assert (constant - ratio * moved).norm() < 1e-3 * constant.norm()


def test_the_entropy_bonus_is_a_mean_over_tokens(model):
    """All advantages are 0, so only the bonus changes the policy. The entropy rises."""
    samples = a_step(model)
    for sample in samples:
        sample.advantage = 0.0
    options = dict(entropy_coef=0.1, max_response_length=1000, max_grad_norm=1e9)
    moved = updated(model, samples, **options)[0]
    assert (moved - weights_of(policy_of(model))).abs().max() > 1e-5
    policy = with_sgd(policy_of(model, **options))
    entropies = []
    for _ in range(2):
        entropies.append(sum(entropy[mask].sum().item() for _, _, entropy, mask in policy.forward(samples)))
        policy.update(groups_of(samples), lr=1.0)
    assert entropies[1] > entropies[0] + 0.01


class WithMomentum(Policy):
    """A policy with a different optimizer and two groups of parameters."""

    def new_optimizer(self):
        head, body = [], []
        for name, parameter in self.trainable():
            (head if "lm_head" in name else body).append((name, parameter))
        groups = [dict(params=head), dict(params=body)]
        return torch.optim.SGD(groups, lr=self.config.lr, momentum=0.9)


def test_adamw_gets_its_settings(model):
    (group,) = policy_of(model, adam_betas=(0.5, 0.7), weight_decay=0.3).optimizer.param_groups
    assert group["betas"] == (0.5, 0.7) and group["weight_decay"] == 0.3


@pytest.mark.slow
def test_any_optimizer_has_the_steps_learning_rate_and_goes_on_from_a_checkpoint(model, tmp_path):
    model.save_pretrained(tmp_path / "model")
    first = WithMomentum(config_of(model=str(tmp_path / "model")), str(tmp_path / "model"), CPU)
    before = weights_of(first).clone()
    first.update(groups_of(a_step(model)), lr=0.0)
    assert torch.equal(weights_of(first), before)  # this holds in both groups
    first.update(groups_of(a_step(model)), lr=1e-2)
    first.save(tmp_path / "saved")
    second = WithMomentum(first.config, str(tmp_path / "saved"), CPU)
    second.load_optimizer(tmp_path / "saved")
    for policy in (first, second):
        policy.update(groups_of(a_step(model, seed=1)), lr=1e-2)
    assert torch.equal(weights_of(first), weights_of(second))
    assert len(second.optimizer_state()) == len(dict(second.trainable()))  # each weight has a momentum


def test_a_checkpoint_from_before_the_first_update_changes_no_later_one(model, tmp_path):
    model.save_pretrained(tmp_path / "model")
    config = config_of(model=str(tmp_path / "model"))
    alone, saved, resumed = (Policy(config, config.model, CPU) for _ in range(3))
    saved.save(tmp_path / "saved")
    resumed.load_optimizer(tmp_path / "saved")
    for policy in (alone, saved, resumed):
        policy.update(groups_of(a_step(model)), lr=1e-3)
    assert torch.equal(weights_of(alone), weights_of(saved))
    assert torch.equal(weights_of(alone), weights_of(resumed))


class WithIdleWeights(Policy):
    """A policy with a layer that no loss has reached yet."""

    def setup_model(self, model):
        super().setup_model(model)
        model.model.layers[0].idle = torch.nn.Linear(2, 2, bias=False)
        torch.nn.init.ones_(model.model.layers[0].idle.weight)


def test_a_weight_without_a_gradient_so_far_has_no_state_after_resuming_either(model, tmp_path):
    model.save_pretrained(tmp_path / "model")
    config = config_of(model=str(tmp_path / "model"))
    first = WithIdleWeights(config, config.model, CPU)
    first.update(groups_of(a_step(model)), lr=1e-2)
    first.save(tmp_path / "saved")
    second = WithIdleWeights(config, str(tmp_path / "saved"), CPU)
    second.load_optimizer(tmp_path / "saved")
    assert second.optimizer_state().keys() == first.optimizer_state().keys()
    for policy in (first, second):
        policy.update(groups_of(a_step(model, seed=1)), lr=1e-2)
    assert torch.equal(weights_of(first), weights_of(second))
    # A checkpoint with the states of other weights is rejected.
    second.model.model.layers[0].renamed = second.model.model.layers[0].mlp
    del second.model.model.layers[0].mlp
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: .*renamed"):
        second.load_optimizer(tmp_path / "saved")


def test_log_probabilities_do_not_depend_on_the_chunks_of_logits(model, monkeypatch):
    samples = a_step(model)
    policies = [with_sgd(policy_of(model)) for _ in range(2)]
    policies[0].update(groups_of(samples), lr=1e-2)
    monkeypatch.setitem(causal_lm.LOGITS_AT_ONCE, "cpu", 5 * model.config.vocab_size)
    policies[1].update(groups_of(samples), lr=1e-2)
    assert torch.allclose(weights_of(policies[0]), weights_of(policies[1]), atol=2e-8)


def test_micro_batches_hold_every_sample_once_within_the_budget():
    rng = random.Random(0)
    lengths = [rng.randint(1, 50) for _ in range(200)] + [500]
    batches = policy_file.micro_batches(lengths, 120)
    assert sorted(i for batch in batches for i in batch) == list(range(201))
    assert all(len(batch) * max(lengths[i] for i in batch) <= 120 or len(batch) == 1 for batch in batches)
    assert len(batches) < 201 / 2 and policy_file.micro_batches([], 10) == []


@pytest.mark.parametrize("count", [64, 128])
@pytest.mark.parametrize("mean, longest, budget", [(60, 128, 2048), (500, 1024, 16384), (2000, 8192, 32768)])
def test_no_better_way_to_form_as_many_micro_batches_saves_much_padding(count, mean, longest, budget):
    """Compare with the lowest limit that gives as many, and with the best split of the sorted lengths.

    The lengths are lognormal.
    """
    rng, mu = random.Random(0), math.log(mean) - 0.6**2 / 2
    lengths = [min(longest, max(8, int(rng.lognormvariate(mu, 0.6)))) for _ in range(count)]
    batches = policy_file.micro_batches(lengths, budget)

    def computed(batches):
        return sum(len(batch) * max(lengths[index] for index in batch) for batch in batches)

    limits = range(max(lengths), budget)
    lowest = next(n for n in limits if len(policy_file.micro_batches(lengths, n)) == len(batches))
    ratio = computed(policy_file.micro_batches(lengths, lowest)) / computed(batches)
    assert 0.98 <= round(ratio, 2) <= 1.02  # as the page says
    tokens_now = computed(batches)
    lengths.sort(reverse=True)
    least = [0] + [math.inf] * count  # the fewest computed tokens of the first sequences in this many batches
    for _ in batches:
        before, least = least, [math.inf] * (count + 1)
        for start in range(count):
            for end in range(start + 1, count + 1):
                tokens = lengths[start] * (end - start)
                if tokens <= budget:
                    least[end] = min(least[end], before[start] + tokens)
    assert sum(lengths) < least[-1] and 0.94 <= round(least[-1] / tokens_now, 2) <= 1  # as the page says


@pytest.mark.parametrize("name", ["llama", "qwen2", "cohere", "falcon", "opt", "granite"])
def test_each_prompt_is_computed_once_where_that_saves_much(name, monkeypatch):
    """Eight samples share two prompts, and the model sees each prompt once.

    Log-probabilities, gradients and metrics are the same as without sharing.
    """
    policy, seen = with_sgd(policy_of(of_family(name, **FAMILIES[name]))), []
    assert policy.model.shares_prompts
    prompts = [list(range(5, 30)), list(range(40, 50))]
    samples = [
        Sample({}, prompts[i // 4], [60 + i] * (1 + i), [-1.0] * (1 + i), advantage=(-1.0) ** i)
        for i in range(8)
    ]
    hook = policy.model.get_input_embeddings().register_forward_hook(
        lambda module, inputs, out: seen.append(inputs[0].shape)
    )
    together = policy.update(groups_of(samples), lr=0.0)
    gradient = torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None])
    assert seen == [(2, 25), (8, 7)]  # the prompts, then all response tokens but the last
    policy.model.shares_prompts = False
    seen.clear()
    alone = policy.update(groups_of(samples), lr=0.0)
    assert seen == [(8, 29)] and hook.remove() is None
    assert torch.allclose(
        gradient,
        torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None]),
        atol=1e-4,
        rtol=1e-3,
    )
    for key in ("actor/loss", "actor/grad_norm", "actor/entropy"):
        assert together[key] == pytest.approx(alone[key], rel=1e-4, abs=1e-6), key


def test_every_query_attends_to_a_key_when_prompts_are_shared(model, monkeypatch):
    """A query without keys causes NaN gradients on some GPUs, although everything is finite on a CPU."""
    attention, masks = torch.nn.functional.scaled_dot_product_attention, []

    def watched(query, key, value, attn_mask=None, **options):
        masks.append(attn_mask)
        return attention(query, key, value, attn_mask=attn_mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    sequences = [list(range(5, 30)) + [60, 61, 62]] * 4 + [[40, 41, 42, 70, 71]] * 4
    causal_lm.logprobs_and_entropy(policy_of(model).model, sequences, [3] * 4 + [2] * 4, 1.0)
    watched_masks = [mask for mask in masks if mask is not None]
    assert watched_masks and all(mask.any(-1).all() for mask in watched_masks)


def test_attention_gets_no_mask_where_prompts_are_not_shared(model, monkeypatch):
    """Padding is on the right, where a causal model does not see it. Kernels without a mask are faster."""
    attention, seen = torch.nn.functional.scaled_dot_product_attention, []

    def watched(query, key, value, attn_mask=None, is_causal=False, **options):
        seen.append((attn_mask, is_causal))
        return attention(query, key, value, attn_mask=attn_mask, is_causal=is_causal, **options)

    policy = policy_of(model)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    sequences = [list(range(5, 30)), list(range(40, 52)), [5, 6]]  # different prompts and lengths
    causal_lm.logprobs_and_entropy(policy.model, sequences, [3, 4, 1], 1.0)
    assert seen == [(None, True)] * model.config.num_hidden_layers


def test_tensors_are_copied_to_a_gpu_without_waiting(monkeypatch):
    """A tensor that is already on a device (here: meta) cannot be pinned, and is not."""
    calls = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: calls.append("pinned") or tensor)

    def to(tensor, device, non_blocking=False):
        calls.append((tensor.device.type, str(device), non_blocking))
        return tensor

    monkeypatch.setattr(torch.Tensor, "to", to)
    gpu = torch.device("cuda:0")
    assert causal_lm.padded([[1, 2], [3]], gpu, torch.long).tolist() == [[1, 2], [3, 0]]
    assert causal_lm.mask_of([2, 1], gpu).tolist() == [[True, True], [True, False]]
    assert calls == ["pinned", ("cpu", "cuda:0", True)] * 2
    causal_lm.on_device(torch.ones(1, device="meta"), gpu)
    causal_lm.on_device(torch.ones(1), CPU)
    assert calls[4:] == [("meta", "cuda:0", True), ("cpu", "cpu", False)]


@pytest.mark.parametrize("name", ["mistral", "qwen3_next", "gemma3n_text", "mamba"])
def test_prompts_are_not_shared_where_a_cache_is_of_another_kind(name):
    config = FAMILIES.get(name, dict(vocab_size=96, hidden_size=32, num_hidden_layers=2))
    assert not policy_of(of_family(name, **config)).model.shares_prompts


def test_prompts_are_not_shared_where_positions_are_columns(monkeypatch):
    """MPT's ALiBi counts the padding between a short prompt and its response.

    Both the signature of its forward and the log-probabilities reveal this.
    """
    family_model = of_family("mpt", vocab_size=96, d_model=32, n_layers=2, n_heads=4, max_seq_len=64)
    assert not causal_lm.can_share_prompts(family_model)
    monkeypatch.setattr(policy_file, "can_share_prompts", lambda model: True)
    assert not policy_of(family_model).model.shares_prompts


def test_prompts_are_not_shared_where_the_model_says_something_else_then(model, monkeypatch):
    states = causal_lm.shared_states

    def wrong(*arguments):
        output, hidden, targets = states(*arguments)
        return output, 2 * hidden, targets

    monkeypatch.setattr(causal_lm, "shared_states", wrong)
    assert not policy_of(model).model.shares_prompts


def test_large_logits_of_a_model_in_bf16_are_no_reason_to_reject_it(monkeypatch):
    """On a GPU, a model's own logits are in bf16: above 64, they are multiples of 0.5.

    The bias of the head moves all logits, which changes no log-probability. Another head is still rejected.
    """
    shape = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4)
    of_phi = of_family("phi", vocab_size=1000, **shape)
    torch.nn.init.constant_(of_phi.lm_head.bias, -80.0)
    of_phi.shares_prompts = False
    monkeypatch.setattr(causal_lm, "precision", lambda device: torch.autocast("cpu", torch.bfloat16))
    monkeypatch.setitem(causal_lm.ALLOWED_DIFFERENCE, "cpu", causal_lm.ALLOWED_DIFFERENCE["cuda"])
    causal_lm.check_logprobs(causal_lm.logprobs_and_entropy, of_phi, "phi", CPU)
    right = causal_lm.logits_of
    monkeypatch.setattr(causal_lm, "logits_of", lambda *arguments: 1.5 * right(*arguments))
    with pytest.raises(ValueError, match="^--model phi: PhiForCausalLM cannot be trained"):
        causal_lm.check_logprobs(causal_lm.logprobs_and_entropy, of_phi, "phi", CPU)


def test_a_step_without_the_speed_ups_is_the_same_step(model, monkeypatch):
    """Compare rollouts, update and metrics with and without shared prompts and a preallocated cache."""
    found = []
    for fast in (True, False):
        if not fast:
            monkeypatch.setattr(causal_lm, "RoomyLayer", DynamicLayer)
            monkeypatch.setattr(causal_lm, "SHARE_FROM", 1.0)
        samples = a_step(model)
        found.append((samples, *updated(model, samples)))
    (samples, weights, metrics), (same_samples, same_weights, same_metrics) = found
    assert [s.response_ids for s in samples] == [s.response_ids for s in same_samples]
    assert torch.allclose(weights, same_weights, atol=1e-7)
    assert same_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_layers_compute_the_same_update(model, monkeypatch, checkpointing):
    """Compile without code generation, which takes minutes on a CPU. No layer is split by a graph break.

    Each pass with gradients calls each compiled layer, once more if the activations are recomputed.
    """
    calls, response_states = Counter(), causal_lm.response_states

    def backend(graph, inputs):
        compiled = torch._dynamo.lookup_backend("aot_eager")(graph, inputs)
        return lambda *arguments: calls.update(layer=torch.is_grad_enabled()) or compiled(*arguments)

    def counted(*arguments):
        calls.update(model=torch.is_grad_enabled())
        return response_states(*arguments)

    changes = dict(gradient_checkpointing=checkpointing, max_tokens_per_micro_batch=40)
    expected, metrics = updated(model, a_step(model), **changes)
    monkeypatch.setattr(
        policy_file, "compile_layers", functools.partial(causal_lm.compile_layers, backend=backend)
    )
    monkeypatch.setattr(causal_lm, "response_states", counted)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    got, same = updated(model, a_step(model), compile_layers=True, **changes)
    assert torch.allclose(got, expected, atol=1e-7) and same == pytest.approx(metrics, rel=1e-4, abs=1e-6)
    assert not torch._dynamo.utils.counters["graph_break"]
    assert calls["layer"] == (1 + checkpointing) * model.config.num_hidden_layers * calls["model"] > 0


def test_second_mini_batch_uses_the_log_probabilities_from_before_the_first_update(model):
    _, metrics = updated(model, a_step(model), mini_batch_size=1, lr=0.05)
    assert metrics["actor/updates"] > 1
    assert metrics["rollout/logprob_diff"] < 1e-5  # "old" comes from the rollout in every mini-batch
    assert metrics["actor/approx_kl"] > 0  # but the policy has changed


@pytest.mark.parametrize("sampler_logprobs", [False, True])
def test_a_stale_rollout_is_noticed(model, sampler_logprobs):
    stale = warm_start.new_model(model.config.vocab_size, seed=1)
    _, metrics = updated(stale, a_step(model), sampler_logprobs=sampler_logprobs)
    assert metrics["rollout/logprob_diff"] > 0.01
    samples = a_step(model)
    for sample in samples:  # Differences of opposite signs do not cancel.
        for number in range(len(sample.rollout_logprobs)):
            sample.rollout_logprobs[number] += 0.5 * (-1) ** number
    _, metrics = updated(model, samples, sampler_logprobs=sampler_logprobs)
    assert metrics["rollout/logprob_diff"] == pytest.approx(0.5, rel=1e-3)
    samples = a_step(model)
    samples[0].rollout_logprobs[0] = math.nan
    with pytest.raises(RuntimeError, match="logprob_diff nan exceeds --max-logprob-diff 0.01"):
        policy = policy_of(model, sampler_logprobs=sampler_logprobs)
        policy.update(groups_of(samples), lr=1.0, max_logprob_diff=0.01)


def test_samples_without_verdict_and_groups_without_spread_change_nothing(model):
    samples = a_step(model)
    reference, _ = updated(model, samples)
    assert [i for i, sample in enumerate(samples) if sample.advantage is None] == [1]
    text = samples[1].response_ids, samples[1].rollout_logprobs
    samples[1].response_ids, samples[1].rollout_logprobs = [20] * 9, [-1.0] * 9  # its text does not matter
    assert torch.equal(updated(model, samples)[0], reference)
    samples[1].response_ids, samples[1].rollout_logprobs = text
    for sample in samples:
        sample.advantage = 0.0
    unchanged, metrics = updated(model, samples)
    assert torch.equal(unchanged, torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert metrics["actor/updates"] == 0 and "actor/loss" not in metrics
    assert metrics["rollout/logprob_diff"] < 1e-5 and metrics["actor/entropy"] > 1  # both are still reported


def test_nothing_is_mutated(model):
    samples = a_step(model)
    before = copy.deepcopy(samples)
    updated(model, samples, mini_batch_size=2, tis_cap=2.0, entropy_coef=0.01)
    assert samples == before


def moved_away(model):
    """Return a copy of the model with slightly different weights."""
    moved = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return moved


def test_kl_pulls_back_to_the_reference_also_where_no_reward_differs(model, tmp_path):
    """All advantages are 0, so only the KL term remains, and it moves the policy towards the reference."""
    model.save_pretrained(tmp_path)  # this is the reference
    samples = a_step(model)
    for sample in samples:
        sample.advantage = 0.0
    moved = moved_away(model)
    policy = with_sgd(policy_of(moved, model=str(tmp_path), kl_coef=1.0, max_grad_norm=1e9))
    kls = [policy.update(groups_of(samples), lr=0.05)["actor/kl_to_reference"] for _ in range(4)]
    assert kls[0] > 1e-3 and kls == sorted(kls, reverse=True) and kls[-1] < 0.9 * kls[0]
    at_home = with_sgd(policy_of(model, model=str(tmp_path), kl_coef=1.0)).update(groups_of(samples), lr=0.0)
    assert (
        at_home["actor/kl_to_reference"] == pytest.approx(0, abs=1e-7) and at_home["actor/grad_norm"] < 1e-4
    )
    # The metric is a mean over tokens, also if the loss is divided by the constant length of Dr. GRPO.
    options = dict(model=str(tmp_path), kl_coef=1.0, max_grad_norm=1e9, max_response_length=1000)
    mean, constant = (
        with_sgd(policy_of(moved, advantage=name, **options)).update(groups_of(samples), lr=0.0)
        for name in ("grpo", "dr_grpo")
    )
    assert mean["actor/kl_to_reference"] == pytest.approx(constant["actor/kl_to_reference"], rel=1e-6)
    assert mean["actor/grad_norm"] > 1e-3 and mean["actor/kl_to_reference"] > 1e-3


def test_truncated_importance_sampling_weighs_the_update(model):
    """If the sampler's probability is half the trainer's, the weight is 2, or the cap if that is lower."""
    samples = a_step(model)
    for sample in samples:
        sample.rollout_logprobs = [value - math.log(2) for value in sample.rollout_logprobs]
    norms = {cap: updated(model, samples, tis_cap=cap)[1]["actor/grad_norm"] for cap in (None, 1.5, 4.0)}
    assert norms[1.5] == pytest.approx(1.5 * norms[None], rel=1e-3) and norms[4.0] == pytest.approx(
        2 * norms[None], rel=1e-3
    )


def test_how_far_the_correction_goes_is_logged(model):
    samples = a_step(model)
    for sample in samples:
        sample.rollout_logprobs = [value - math.log(2) for value in sample.rollout_logprobs]
    metrics = updated(model, samples, tis_cap=1.5)[1]
    assert metrics["rollout/tis_mean"] == pytest.approx(1.5) and metrics["rollout/tis_capped"] == 1.0
    metrics = updated(model, samples, tis_cap=4.0)[1]
    assert metrics["rollout/tis_mean"] == pytest.approx(2.0, rel=1e-4)
    assert metrics["rollout/tis_capped"] == 0.0
    assert "rollout/tis_mean" not in updated(model, samples)[1]


def test_the_end_token_counts_even_if_it_is_the_padding_token(model):
    """Masks depend on lengths.

    Token 0 is padding, but a response that ends in it still has its log-probability.
    """
    samples = [Sample({}, [5, 6], [0]), Sample({}, [7, 8], [9, 10, 0])]
    short, long = (
        logprobs for _, logprobs in sorted(policy_of(model).logprobs_of(samples), key=lambda s: len(s[1]))
    )
    with torch.no_grad():
        expected = model(torch.tensor([[5, 6]])).logits[0, 1].log_softmax(-1)[0]
    assert (
        short.tolist() == [pytest.approx(expected.item(), abs=1e-5)] and len(long) == 3 and (long < 0).all()
    )


@pytest.mark.parametrize(
    "advantage, message",
    [
        (math.inf, r"loss \(-?(inf|nan)\).*not finite"),
        (1e30, r"loss \(-?\d\S+\) or the gradient norm \(inf\) is not finite"),
    ],
)
def test_a_loss_that_is_not_finite_stops_the_run(model, advantage, message):
    samples = a_step(model)
    for sample in samples:
        sample.advantage = advantage if sample.advantage else 0.0
    with pytest.raises(RuntimeError, match=message):
        updated(model, samples)


@pytest.mark.parametrize("has_signal", [True, False])
def test_a_sampler_with_other_weights_is_noticed_before_the_first_optimizer_step(has_signal, model):
    policy, samples = (
        policy_of(warm_start.new_model(model.config.vocab_size, seed=1), mini_batch_size=1),
        a_step(model),
    )
    if not has_signal:
        for sample in samples:
            sample.advantage = 0.0
    before = weights_of(policy)
    with pytest.raises(
        RuntimeError, match="logprob_diff .* exceeds --max-logprob-diff 0.01: the sampler does not use"
    ):
        policy.update(groups_of(samples), lr=1.0, max_logprob_diff=0.01)
    assert policy.num_updates == 0 and torch.equal(weights_of(policy), before)


def test_weights_that_are_not_finite_are_never_saved(model, tmp_path):
    policy = policy_of(model)
    policy.model.lm_head.weight.data[3, 5] = math.nan
    with pytest.raises(RuntimeError, match="weight lm_head.weight is not finite, so nothing was saved"):
        policy.save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


# ---- model families


SMALL = dict(
    vocab_size=96,
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    intermediate_size=64,
    pad_token_id=0,
)
GROUPED = SMALL | dict(num_key_value_heads=2, head_dim=8)
LINEAR = dict(
    linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8
)
LATENT = dict(
    num_key_value_heads=4,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    v_head_dim=8,
    qk_nope_head_dim=8,
)
FAMILIES = {
    "llama": GROUPED,
    "qwen2": GROUPED,
    "mistral": GROUPED | dict(sliding_window=4),
    # Test what follows the head: caps, scales, another layer.
    "gemma2": GROUPED | dict(final_logit_softcapping=2.0),
    "vaultgemma": GROUPED | dict(final_logit_softcapping=2.0),
    "nanochat": GROUPED | dict(final_logit_softcapping=2.0),
    "cohere": GROUPED | dict(logit_scale=0.3),
    "granite": GROUPED | dict(logits_scaling=4.0),
    "hyperclovax": GROUPED | dict(logits_scaling=3.0),
    "minicpm3": SMALL | LATENT | dict(dim_model_base=16),
    "modernbert-decoder": GROUPED,
    "llama4_text": GROUPED | dict(intermediate_size_mlp=64, num_local_experts=2),
    "opt": SMALL | dict(ffn_dim=64, word_embed_proj_dim=32, dropout=0.5),  # dropout within the layer
    # Test models with positions from the mask.
    "falcon": SMALL | dict(alibi=True, new_decoder_architecture=False, num_kv_heads=4),
    "qwen3_next": GROUPED
    | LINEAR
    # Test caches of two kinds.
    | dict(
        num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16, shared_expert_intermediate_size=16
    ),
    "qwen3_5_text": GROUPED | LINEAR,
    "olmo_hybrid": GROUPED | LINEAR | dict(linear_num_key_heads=4),
    "gemma4_text": GROUPED | dict(hidden_size_per_layer_input=8, vocab_size_per_layer_input=96),
    "gemma3n_text": GROUPED
    | dict(
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=0,
        laurel_rank=4,
        sliding_window=4,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=96,
        activation_sparsity_pattern=[0.0] * 4,
    ),
}


def of_family(name, **config):
    torch.manual_seed(0)
    family_model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(name, **config), dtype=torch.float32
    ).eval()
    for (
        parameter
    ) in family_model.parameters():  # newly initialised, such small models hardly attend to earlier tokens
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return family_model


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_log_probabilities_are_the_models_own_and_the_samplers_also_with_gradient_checkpointing(name):
    """Compare log-probabilities with model(...).logits, and responses sampled in this process with both.

    Updates with and without gradient checkpointing must agree.
    """
    family_model = of_family(name, **FAMILIES[name])
    policies = [policy_of(family_model, gradient_checkpointing=on) for on in (True, False)]
    check_sampling(policies[0])
    samples = a_step(policies[0].model)
    for sample, logprobs in policies[0].logprobs_of(samples):
        with torch.no_grad():
            logits = family_model(input_ids=torch.tensor([sample.prompt_ids + sample.response_ids])).logits
        own = logits[0, len(sample.prompt_ids) - 1 : -1].log_softmax(-1)
        own = own.gather(-1, torch.tensor(sample.response_ids)[:, None])[:, 0]
        assert torch.allclose(logprobs, own, atol=1e-4)
        assert torch.allclose(torch.tensor(sample.rollout_logprobs), own, atol=1e-4)
    norms = [policy.update(groups_of(samples), lr=1e-3)["actor/grad_norm"] for policy in policies]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5) and norms[0] > 0


@pytest.mark.parametrize("option", ["gradient_checkpointing", "compile_layers"])
def test_a_model_without_marked_layers_is_rejected_when_it_is_loaded(option):
    shape = dict(vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    with pytest.raises(ValueError, match=f"^--{option.replace('_', '-')}: does not work with GPTNeoX"):
        policy_of(of_family("gpt_neox_japanese", **shape), **{option: True})


# ---- a head with bf16 operands


def test_a_product_rounds_its_operands_but_not_its_sums():
    """In bf16, 1 + 1/512 is 1, and 256 + 1 would be 256. The backward pass rounds its operands as well."""
    hidden = torch.tensor([[1 + 1 / 512, 0.0], [256.0, 1.0]], requires_grad=True)
    weight = torch.tensor([[1.0, 1.0], [0.0, 1 + 1 / 512]], requires_grad=True)
    logits = causal_lm.HeadProduct.apply(hidden, weight, weight.detach().bfloat16())
    assert logits.dtype == torch.float32 and logits.tolist() == [[1.0, 0.0], [257.0, 1.0]]
    logits.backward(torch.tensor([[1 + 1 / 512, 0.0], [1.0, 256.0]]))
    assert hidden.grad.tolist() == [[1.0, 1.0], [1.0, 257.0]]
    assert weight.grad.tolist() == [[257.0, 1.0], [65536.0, 256.0]]


def test_a_loaded_model_needs_no_policy(model, tokenizer, tmp_path):
    loaded = causal_lm.load_causal_lm(write_model(tmp_path, model, tokenizer))
    logprobs, _ = causal_lm.logprobs_and_entropy(loaded, [[5, 6, 7], [5, 6, 8]], [2, 1], 1.0)
    assert logprobs.shape == (2, 2)


@pytest.mark.parametrize("temperature", [1.0, 1.25])
@pytest.mark.parametrize("is_tied", [False, True])
def test_a_head_with_rounded_operands_is_the_models_own(temperature, is_tied, monkeypatch):
    """With float32 operands, it is the model's own to rounding errors. With bf16 operands, log-probabilities
    differ by about 0.001 nats and gradients by 0.2 %. The size of the chunks changes neither.
    """
    a_model = of_family("qwen2", **GROUPED | dict(tie_word_embeddings=is_tied))
    a_model.shares_prompts = False
    rng, counts = random.Random(0), [20, 10, 50]
    sequences = [[rng.randrange(96) for _ in range(count + 7)] for count in counts]

    def of(head_dtype, chunk=1000):
        """Return log-probabilities and entropies, and the gradients of a sum of both."""
        monkeypatch.setitem(causal_lm.LOGITS_AT_ONCE, "cpu", chunk * 96)
        a_model.zero_grad()
        found = causal_lm.logprobs_and_entropy(a_model, sequences, counts, temperature, True, head_dtype)
        slopes = torch.linspace(-1, 1, found.numel()).view_as(found)
        (found * slopes).sum().backward()
        gradient = torch.cat([weight.grad.flatten() for weight in a_model.parameters()])
        return found.detach()[:, causal_lm.mask_of(counts, CPU)], gradient

    def relative(one, other):
        return ((one - other).norm() / other.norm()).item()

    expected, gradient = of(None)
    for chunk in (1, 7, 1000):
        exact, same = of(torch.float32, chunk)
        assert (exact - expected).abs().mean() < 5e-7 and relative(same, gradient) < 1e-6
        rounded, close = of(torch.bfloat16, chunk)
        assert 1e-4 < (rounded - expected).abs().mean() < 2e-3 and 1e-4 < relative(close, gradient) < 4e-3
        if chunk == 1:
            first, first_gradient = rounded, close
        assert (rounded - first).abs().max() < 1e-5 and relative(close, first_gradient) < 1e-5


@pytest.mark.parametrize("changes", [{}, dict(lora_rank=4), dict(gradient_checkpointing=True)], ids=str)
def test_an_update_with_a_bf16_head_is_nearly_the_same(model, changes):
    """The reference model has the same head, so the divergence from it is 0 before the first update."""
    samples, options = a_step(model), dict(kl_coef=0.1, entropy_coef=0.01, temperature=0.8) | changes
    found = []
    for bf16_head in (False, True):
        policy = policy_of(model, bf16_head=bf16_head, **options)
        found.append(policy.update(groups_of(samples), lr=1e-3))
    exact, rounded = found
    assert rounded.keys() == exact.keys() and rounded["actor/kl_to_reference"] < 1e-9
    for key in ("actor/loss", "actor/grad_norm"):
        assert rounded[key] == pytest.approx(exact[key], rel=0.01) and rounded[key] != exact[key]


@pytest.mark.parametrize("name", ["llama", "mistral", "opt", "falcon", "gemma2"])
def test_a_plain_head_can_have_bf16_operands(name):
    shape = FAMILIES[name]
    if name == "gemma2":
        shape = shape | dict(final_logit_softcapping=None)
    policy_of(of_family(name, **shape), bf16_head=True)


@pytest.mark.parametrize(
    "name, changes",
    [
        ("gemma2", dict(final_logit_softcapping=30.0)),
        ("cohere", dict(logit_scale=0.0625)),
        ("granite", {}),
        ("modernbert-decoder", {}),
        ("phi", {}),
        ("llama", {}),
    ],
)
def test_a_head_that_is_more_than_a_product_cannot(name, changes):
    """The heads have a cap that hardly changes small logits, scales, another layer, a bias, or an adapter."""
    a_model = of_family(name, **(FAMILIES | dict(phi=GROUPED))[name] | changes)
    lora = {}
    if name == "llama":
        lora = dict(lora_rank=4, lora_targets=("lm_head",))
    policy_of(a_model, **lora)
    message = f"^--bf16-head: does not work with {type(a_model).__name__}, whose head .*; omit --bf16-head$"
    with pytest.raises(ValueError, match=message):
        policy_of(a_model, bf16_head=True, **lora)


MIXTURE = GROUPED | dict(num_experts_per_tok=2)
RENAMED = {
    "mixtral": MIXTURE | dict(num_local_experts=4),
    "qwen3_moe": MIXTURE | dict(num_experts=4, moe_intermediate_size=16),
    "granitemoe": MIXTURE | dict(num_local_experts=4),
    "olmo_hybrid": FAMILIES["olmo_hybrid"],
}


@pytest.mark.parametrize("name", [*RENAMED, "llama", "gemma2"])
def test_servers_get_the_names_and_the_numbers_of_the_models_files(tmp_path, name):
    """In memory, transformers uses different names for many families, and one tensor for all experts of a
    layer.
    """
    family_model = of_family(name, **(FAMILIES | RENAMED)[name])
    family_model.save_pretrained(tmp_path / "own")
    own = load_file(tmp_path / "own/model.safetensors")
    policy = Policy(config_of(), str(tmp_path / "own"), CPU)
    served = dict(policy.weights())
    assert served.keys() - {"lm_head.weight"} == own.keys() - {"lm_head.weight"}
    assert (name in RENAMED) == (policy.model.state_dict().keys() != served.keys())
    assert all(torch.equal(served[key], weight) for key, weight in own.items())
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    assert torch.allclose(read_again(policy, tmp_path)(ids).logits, policy.model(ids).logits, atol=1e-5)
    policy.save(tmp_path / "saved")
    assert load_file(tmp_path / "saved/model.safetensors").keys() == own.keys()


@pytest.mark.parametrize("name", ["qwen2", "gemma2"])
def test_a_checkpoint_has_a_tied_head_only_once(tmp_path, name, monkeypatch):
    """Weights that are copied from a GPU or gathered from several ranks no longer share memory."""
    of_family(name, **FAMILIES[name] | dict(tie_word_embeddings=True)).save_pretrained(tmp_path / "own")
    policy = Policy(config_of(), str(tmp_path / "own"), CPU)
    monkeypatch.setattr(policy_file, "gather_full", torch.clone)
    policy.save(tmp_path / "saved")
    own, saved = (load_file(tmp_path / folder / "model.safetensors") for folder in ("own", "saved"))
    assert saved.keys() == own.keys() and "lm_head.weight" not in saved
    assert all(torch.equal(saved[key], weight) for key, weight in own.items())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2", "vaultgemma"])
def test_a_cap_in_the_attention_is_computed(name):
    """Most attention implementations silently ignore the cap, whereas vLLM and eager attention apply it."""
    family_model = of_family(name, **FAMILIES[name] | dict(attn_logit_softcapping=0.5))
    policy = policy_of(family_model)
    ids = torch.arange(3, 40)[None]
    family_model.set_attn_implementation("sdpa")
    without = family_model(ids).logits
    family_model.set_attn_implementation("eager")
    own = family_model(ids).logits
    assert (own - without).abs().mean() > 0.01
    samples = a_step(policy.model)
    for sample, logprobs in policy.logprobs_of(samples):
        ids = torch.tensor([sample.prompt_ids + sample.response_ids])
        expected = family_model(ids).logits[0, len(sample.prompt_ids) - 1 : -1].log_softmax(-1)
        expected = expected.gather(-1, torch.tensor(sample.response_ids)[:, None])[:, 0]
        assert torch.allclose(logprobs, expected, atol=1e-4)
        assert torch.allclose(torch.tensor(sample.rollout_logprobs), expected, atol=1e-4)


def test_quantised_weights_are_refused_by_name(model, tmp_path):
    """Loaded as float32, the weights would lack their scales, and later checks compare the model only with
    itself.
    """
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    about = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": about}))
    message = rf"--model {tmp_path}: quantised weights \(fp8\) cannot be trained; pass"
    with pytest.raises(ValueError, match=message):
        Policy(config_of(), str(tmp_path), CPU)


FACTORS = dict(short_factor=[1.0] * 8, long_factor=[4.0] * 8)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)


@pytest.mark.parametrize(
    "is_kept, rope",
    [
        (True, dict(rope_type="default")),
        (True, dict(rope_type="linear", factor=4.0)),
        (True, dict(rope_type="dynamic", factor=4.0)),
        (True, LLAMA3),  # The original number of positions is then that of the model.
        (True, LLAMA3 | dict(original_max_position_embeddings=64)),
        (True, dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=1024)),
        (False, dict(rope_type="yarn", factor=None, original_max_position_embeddings=1024)),
        (False, dict(rope_type="longrope", original_max_position_embeddings=1024) | FACTORS),
        (False, dict(rope_type="longrope", original_max_position_embeddings=1024, factor=4.0) | FACTORS),
    ],
)
def test_max_positions_changes_no_position_of_a_short_text(is_kept, rope, tmp_path):
    """The last models compute their scaling from max_position_embeddings. vLLM does so for any longrope."""
    shape = dict(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=120,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(**shape, initializer_range=0.3, rope_parameters=rope | {"rope_theta": 1e4})
    ).save_pretrained(tmp_path)
    ids = torch.arange(5, 105)[None]
    expected = causal_lm.load_causal_lm(str(tmp_path), torch.float32)(ids).logits
    for positions in (4096, 2048, 16384):
        if is_kept or positions == 4096:
            changed = causal_lm.load_causal_lm(str(tmp_path), torch.float32, max_positions=positions)
            assert torch.equal(changed(ids).logits, expected)
            assert changed.config.max_position_embeddings == positions
        else:
            message = f"^--max-positions {positions}: would change every position of {tmp_path}, .*; omit"
            with pytest.raises(ValueError, match=message):
                causal_lm.read_config(str(tmp_path), max_positions=positions)


def test_tokens_that_cannot_come_add_nothing_to_the_entropy(model, monkeypatch):
    """Some models mask the padding of their vocabulary with -inf."""
    original = type(model).forward

    def masked(self, *args, **kwargs):
        out = original(self, *args, **kwargs)
        beyond = torch.arange(out.logits.shape[-1]) >= 90
        out.logits = out.logits.masked_fill(beyond, -math.inf)
        return out

    monkeypatch.setattr(type(model), "forward", masked)
    policy = policy_of(model, entropy_coef=0.01)
    metrics = policy.update(groups_of(a_step(policy.model)), lr=1e-3)
    assert math.isfinite(metrics["actor/loss"]) and metrics["actor/grad_norm"] > 0


def test_a_loss_term_made_from_an_entropy_that_was_not_computed_stops_the_run(model, monkeypatch):
    """Without --entropy-coef, the entropy is not computed.

    If it were 0, such a term would silently do nothing.
    """
    original = policy_file.compute_policy_loss
    policy = policy_of(model)
    forward = policy.forward
    entropies = []

    def seen(samples, *arguments):
        for part, logprobs, entropy, mask in forward(samples, *arguments):
            entropies.append(entropy[mask].sum())
            yield part, logprobs, entropy, mask

    def with_a_term(*arguments, **options):
        loss, found = original(*arguments, **options)
        return loss + 0.01 * entropies[-1], found

    samples = groups_of(a_step(policy.model))
    assert math.isfinite(policy.update(samples, lr=1e-3)["actor/loss"])
    policy.forward = seen
    monkeypatch.setattr(policy_file, "compute_policy_loss", with_a_term)
    with pytest.raises(RuntimeError, match=r"loss \(nan\) or the gradient .* not finite"):
        policy.update(samples, lr=1e-3)


def test_gradient_checkpointing_keeps_fewer_activations_and_changes_nothing(model):
    """The test counts the tensors that autograd saves in the forward passes of the layers."""
    samples, saved, norms = a_step(model), [], []
    for on in (False, True):
        policy, count = policy_of(model, gradient_checkpointing=on), Counter()

        def pack(tensor, count=count):
            count["numbers"] += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            norms.append(policy.update(groups_of(samples), lr=1e-3)["actor/grad_norm"])
        saved.append(count["numbers"])
        assert not policy.model.training and not any(module.training for module in policy.model.modules())
        assert policy.model.shares_prompts and policy.model.model.layers[0].forward.__name__ == "forward"
    assert norms[0] == pytest.approx(norms[1], rel=1e-5) and saved[1] < 0.7 * saved[0]


def test_a_weight_takes_sixteen_bytes_between_updates_and_servers_get_two(model):
    """Weights, gradients and both moments are float32. A reference model adds four bytes."""
    for kl_coef, expected in ((0.0, 16), (0.1, 20)):
        policy = policy_of(model, kl_coef=kl_coef)
        policy.update(groups_of(a_step(model)), lr=1e-3)
        weights = list(policy.model.parameters())
        held = weights + [weight.grad for weight in weights]
        for state in policy.optimizer.state.values():
            held += [state["exp_avg"], state["exp_avg_sq"]]
        if policy.reference is not None:
            held += policy.reference.parameters()
        assert {tensor.dtype for tensor in held} == {torch.float32}
        assert sum(tensor.nbytes for tensor in held) == expected * sum(weight.numel() for weight in weights)
        assert {weight.dtype for _, weight in policy.weights(torch.bfloat16)} == {torch.bfloat16}
        policy.release_memory()  # Judges that wake up need it.
        assert all(weight.grad is None for weight in weights)


def test_a_model_that_cannot_be_sampled_in_this_process_is_refused_by_name():
    """Mamba passes its state under a different name and ignores the key-value cache, so responses would not
    depend on their prompts.
    """
    policy = policy_of(of_family("mamba", vocab_size=96, hidden_size=32, num_hidden_layers=2))
    message = "--rollout hf: sampling from Mamba.* is incorrect .*; pass --rollout vllm"
    with pytest.raises(ValueError, match=message):
        check_sampling(policy)
    # Training works with vLLM.
    assert policy.update(groups_of(a_step(of_family("llama", **GROUPED))), lr=1e-3)["actor/updates"] == 1


def test_a_model_whose_log_probabilities_come_out_wrong_is_refused_by_name(model, monkeypatch):
    """This head uses more than the hidden states that causal_lm.logits_of passes to it."""
    original = type(model).forward

    def strange(self, *args, input_ids=None, **kwargs):
        out = original(self, *args, input_ids=input_ids, **kwargs)
        out.logits = out.logits * (1 + input_ids[0, 0].float() % 3)
        return out

    monkeypatch.setattr(type(model), "forward", strange)
    with pytest.raises(ValueError, match=r"--model \S+: LlamaForCausalLM cannot be trained, "):
        policy_of(model)


@pytest.mark.parametrize("do_sample", [{}, {"do_sample": False}, {"do_sample": True}])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "top_p": 0.6}])
def test_a_checkpoint_keeps_the_decoding_of_the_base_model(sampling, do_sample, model, tmp_path):
    """With `generate()`, a trained model is compared with its base, so both must be greedy, or neither."""
    model.save_pretrained(tmp_path)
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": 1} | sampling | do_sample))
    Policy(config_of(), str(tmp_path), CPU).save(tmp_path / "saved")
    written = GenerationConfig.from_pretrained(tmp_path / "saved")
    assert bool(written.do_sample) == do_sample.get("do_sample", False)
    assert sampling.items() <= written.to_dict().items()


def test_sampling_values_without_do_sample_do_not_make_saving_impossible(model, tmp_path):
    """Vicuna and some fine-tuned Mistral models have such files, which transformers reads but refuses to
    write.
    """
    model.save_pretrained(tmp_path)
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"temperature": 0.9, "top_p": 0.6}))
    policy = Policy(config_of(), str(tmp_path), CPU)
    policy.save(tmp_path / "saved")
    assert json.loads((tmp_path / "saved/generation_config.json").read_text())["temperature"] == 0.9


BEAMS = {"early_stopping": True, "length_penalty": 1.2}


@pytest.mark.parametrize("lora_rank", [0, 2])
@pytest.mark.parametrize(
    "name, stored, dropped",
    [
        ("generation_config.json", BEAMS | {"num_beams": 2}, ()),
        ("generation_config.json", {"pad_token_id": -1} | BEAMS, {"pad_token_id": -1} | BEAMS),
        ("generation_config.json", {"output_scores": True}, ("output_scores",)),
        (
            "generation_config.json",
            {"use_cache": False, "cache_implementation": "hybrid"},
            ("cache_implementation",),
        ),
        ("config.json", {"pad_token_id": -1} | BEAMS, {"pad_token_id": -1} | BEAMS),
        ("config.json", {"output_attentions": True}, ()),
    ],
)
def test_settings_of_generate_do_not_make_saving_impossible(
    name, stored, dropped, lora_rank, model, tokenizer, tmp_path
):
    """The first conversions of Llama have such files, which transformers reads but refuses to write."""
    model.save_pretrained(tmp_path)
    sampling = {"temperature": 0.9, "top_p": 0.6}
    if name == "config.json":
        (tmp_path / "generation_config.json").unlink()
        file = tmp_path / name
        file.write_text(json.dumps(json.loads(file.read_text()) | sampling | stored))
    else:
        (tmp_path / name).write_text(json.dumps({"eos_token_id": 1} | sampling | stored))
    policy = Policy(config_of(model=str(tmp_path), lora_rank=lora_rank), str(tmp_path), CPU)
    policy.save(tmp_path / "saved")
    kept = {key: value for key, value in (sampling | stored).items() if key not in dropped}
    written = json.loads((tmp_path / "saved/generation_config.json").read_text())
    assert kept.items() <= written.items() and not set(dropped) & written.keys()
    assert b"output_attentions" not in model_files(policy.model_info(), tokenizer)["config.json"]


def test_a_model_whose_settings_cannot_be_saved_is_refused_by_name(model, tmp_path, monkeypatch):
    def save_pretrained(self, folder):
        raise RuntimeError("the field x\nis wrong")

    model.save_pretrained(tmp_path)
    monkeypatch.setattr(type(model.config), "save_pretrained", save_pretrained)
    with pytest.raises(
        ValueError, match=r"--model \S+: .* \(the field x is wrong\); correct its config.json"
    ):
        Policy(config_of(), str(tmp_path), CPU)


# ---- what the metrics mean


def test_a_short_rest_of_groups_is_dealt_out_evenly(model):
    """Nine groups in mini-batches of at most four become three, three and three, not four, four and one."""
    samples = [Sample({}, [i]) for i in range(18)]
    batches = split_mini_batches(groups_of(samples, 2), mini_batch_size=4)
    assert [len(batch) for batch in batches] == [6, 6, 6] and [
        s for batch in batches for s in batch
    ] == samples
    assert [len(batch) // 2 for batch in split_mini_batches(groups_of(samples[:10], 2), 4)] == [2, 3]
    assert split_mini_batches([samples[:2]], 4) == [samples[:2]]


def test_means_over_tokens_do_not_shrink_when_fewer_groups_have_spread(model):
    """Update on groups with a learning signal, alone and together with as many without one.

    The update's metrics are equal.
    """
    samples = a_step(model)
    idle = [dataclasses.replace(sample, advantage=0.0) for sample in samples]
    options = dict(mini_batch_size=2, lr=0.05)
    _, alone = updated(model, samples, **options)
    _, beside = updated(model, samples + idle, **options)
    assert alone["actor/updates"] == beside["actor/updates"] == 2
    for key in ("actor/approx_kl", "actor/clip_fraction", "actor/loss", "actor/grad_norm"):
        assert beside[key] == pytest.approx(alone[key], rel=1e-4, abs=1e-9), key
    assert alone["actor/approx_kl"] > 0


def test_entropy_is_estimated_from_all_samples_as_they_were_sampled(model):
    """Samples without a learning signal count as well; otherwise a baseline and FAPO could not be compared.

    On average, minus the log-probability of a sampled token is the entropy of its distribution.
    """
    samples = roll_out(model, [[5, 6, 7]], group_size=512, length=1, eos_ids=())
    policy = policy_of(model, entropy_coef=1.0)
    (_, _, entropy, _), *_ = policy.forward(samples[:1])
    for sample in samples:
        sample.advantage = 0.0
    samples[0].advantage = 1.0
    metrics = policy_of(model).update([samples], lr=0.0)
    assert metrics["actor/updates"] == 1
    assert metrics["actor/entropy"] == pytest.approx(entropy.item(), rel=0.05) and entropy > 1


def test_entropy_is_that_of_the_tokens_that_the_policy_wrote(model):
    sample = roll_out(model, [[5, 6, 7]], group_size=1, length=5, eos_ids=())[0]
    sample.loss_mask, sample.advantage = [True, False, False, True, False], 1.0
    sample.rollout_logprobs = [-1.0, -64.0, 0.0, -2.0, -64.0]
    metrics = policy_of(model).update([[sample]], lr=0.0)
    assert metrics["actor/entropy"] == (1.0 + 2.0) / 2


def two_mini_batches(model, number_of_tokens):
    """Return two groups of one sample with different lengths, each of which forms a mini-batch."""
    samples = roll_out(model, [[5, 6, 7], [8, 9]], group_size=1, length=9, eos_ids=())
    for sample, count in zip(samples, number_of_tokens, strict=True):
        sample.response_ids = sample.response_ids[:count]
        sample.rollout_logprobs = sample.rollout_logprobs[:count]
    return samples


def test_the_logged_loss_is_the_mean_over_mini_batches(model):
    """With lr 0, every ratio is 1, so a mini-batch of one sample has the loss -advantage."""
    samples = two_mini_batches(model, (2, 8))
    samples[0].advantage, samples[1].advantage = 3.0, -1.0
    policy = with_sgd(policy_of(model, mini_batch_size=1))
    metrics = policy.update([[sample] for sample in samples], lr=0.0)
    assert metrics["actor/updates"] == 2
    assert metrics["actor/loss"] == pytest.approx((-3.0 + 1.0) / 2, rel=1e-4)


def test_the_logged_gradient_norm_is_the_mean_over_updates(model):
    """With lr 0, an update alone has the gradient that it has in the step."""
    samples = two_mini_batches(model, (2, 8))
    samples[0].advantage, samples[1].advantage = 3.0, -1.0
    steps = [[samples[:1]], [samples[1:]], [samples[:1], samples[1:]]]
    norms = []
    for groups in steps:
        policy = with_sgd(policy_of(model, mini_batch_size=1))
        norms.append(policy.update(groups, lr=0.0)["actor/grad_norm"])
    assert norms[0] > 2 * norms[1] > 0 and norms[2] == pytest.approx((norms[0] + norms[1]) / 2, rel=1e-4)


@pytest.mark.parametrize("sampler_logprobs", [False, True])
def test_the_logged_kl_is_the_mean_over_tokens_of_all_mini_batches(model, tmp_path, sampler_logprobs):
    """Compare with exp(d) - d - 1, computed from the log-probabilities of both models over 2 + 8 tokens."""
    moved = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    samples = two_mini_batches(moved, (2, 8))
    kl = 0.0
    for sample in samples:
        sample.advantage = 0.0
        of_models = []
        for a_model in (model, moved):
            ids = torch.tensor([sample.prompt_ids + sample.response_ids])
            logits = a_model(ids).logits[0, len(sample.prompt_ids) - 1 : -1]
            chosen = torch.tensor(sample.response_ids)[:, None]
            of_models.append(logits.log_softmax(-1).gather(-1, chosen).detach())
        difference = of_models[0] - of_models[1]
        kl += (difference.exp() - difference - 1).sum().item()
    model.save_pretrained(tmp_path)  # this is the reference
    options = dict(kl_coef=1.0, mini_batch_size=1, sampler_logprobs=sampler_logprobs)
    policy = with_sgd(policy_of(moved, model=str(tmp_path), **options))
    metrics = policy.update([[sample] for sample in samples], lr=0.0)
    assert kl > 0.01 and metrics["actor/kl_to_reference"] == pytest.approx(kl / 10, rel=1e-3)


def test_entropy_is_a_mean_over_tokens(model):
    """It is not a mean over samples, in which a short sample would count as much as a long one."""
    samples = two_mini_batches(model, (2, 8))
    total = -sum(sum(sample.rollout_logprobs) for sample in samples)
    per_sample = -sum(sum(sample.rollout_logprobs) / len(sample.response_ids) for sample in samples) / 2
    for sample in samples:
        sample.advantage = 0.0
    metrics = with_sgd(policy_of(model)).update([[sample] for sample in samples], lr=0.0)
    assert metrics["actor/entropy"] == pytest.approx(total / 10, rel=1e-5)
    assert abs(per_sample - total / 10) > 1e-3


def count_passes(policy):
    """Record the number of responses that the model reads in each pass of an update."""
    seen, compute = [], policy.model_logprobs

    def counting(model, sequences, counts, *options):
        seen.append((len(counts), torch.is_grad_enabled()))
        return compute(model, sequences, counts, *options)

    policy.model_logprobs = counting
    return seen


def test_only_samples_with_a_gradient_are_computed(model):
    """In each of two mini-batches of 8, 4 samples have a learning signal.

    Samples of the second one are read before the first update as well, unless this model sampled them.
    The option sampler_logprobs does the same, and reports the importance weights. Without any learning
    signal, one group is read.
    """
    samples = a_step(model)
    for number, sample in enumerate(samples):
        sample.advantage = float(number % 8 < 4)
    found = []
    for samples_itself, option in ((False, False), (True, False), (False, True)):
        policy = policy_of(model, mini_batch_size=2, sampler_logprobs=option)
        with_sgd(policy)  # Adam would amplify rounding errors
        policy.samples_itself = samples_itself
        seen = count_passes(policy)
        found.append((policy.update(groups_of(samples), lr=1e-2), weights_of(policy), seen))
    (metrics, weights, seen), (same_metrics, same_weights, fewer), by_option = found
    option_metrics, option_weights, passes = by_option
    assert passes == fewer and torch.equal(option_weights, same_weights)
    # The first update sees a ratio of 1, and the second one sees what the first one changed.
    assert option_metrics.pop("rollout/is_mean") == pytest.approx(1.0, abs=0.1)
    assert 0.9 < option_metrics.pop("rollout/is_effective") < 1
    assert option_metrics == same_metrics
    assert seen == [(4, False), (4, True), (4, True)] and fewer == [(4, True), (4, True)]
    assert torch.allclose(weights, same_weights, atol=1e-6)
    for key in ("actor/loss", "actor/approx_kl", "actor/entropy"):
        assert same_metrics[key] == pytest.approx(metrics[key], rel=1e-3, abs=1e-6)
    for sample in samples:
        sample.advantage = 0.0
    seen = count_passes(policy := policy_of(model))
    assert policy.update(groups_of(samples), lr=1e-2)["actor/updates"] == 0 and seen == [(4, False)]
