"""Only makes it faster: delete this file, and every result is the same.

    shared_states   in the update: equal prompts of a micro-batch once (20-25 % less time with short answers)
    roomy           in rollouts: a key-value cache that is written into, not copied (8-40 % of a rollout)

policy.py and rollout.py use it where the file is there. Whether a model can share prompts is tried when it is
loaded. Left out: compilation, attention kernels of our own, packing instead of padding (slower on CPU).
Needs policy.py and algorithm.py. Shapes as in policy.py.
"""

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

import policy  # which imports this file, too: look its names up when they are needed

# Prompts are shared where at least this share of the tokens repeats others: sharing needs an attention mask,
# which costs as much as it saves when answers are long.
SHARE_FROM = 0.25


def shared_states(model, sequences, counts):
    """As policy.response_states, each distinct prompt computed once; None where it is not worth it.

    Keys and values of a prompt, and so their gradients, are shared by its responses.
    """
    prompts = [tuple(sequence[: len(sequence) - count]) for sequence, count in zip(sequences, counts)]
    if not getattr(model, "shares_prompts", False) or not worth_sharing(prompts, counts):
        return None
    device, body = next(model.parameters()).device, policy.body_of(model)
    distinct = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
    cache = DynamicCache(config=model.config)
    which = torch.tensor([distinct[prompt] for prompt in prompts], device=device)
    ids, attended, positions = policy.left_padded(list(distinct), device)
    inputs = dict(past_key_values=cache, use_cache=True)
    output = body(input_ids=ids, attention_mask=attended, position_ids=positions, **inputs)
    hidden = output.last_hidden_state[which, -1:]  # predicts the first token
    ids = policy.padded([s[len(s) - n :] for s, n in zip(sequences, counts)], device, torch.long)
    mask = policy.mask_of(counts, device)
    cache.reorder_cache(which)
    attended = torch.cat([attended[which], mask[:, :-1]], 1)
    positions = positions[which, -1:] + torch.arange(1, ids.shape[1], device=device)
    later = body(input_ids=ids[:, :-1], attention_mask=attended, position_ids=positions, **inputs)
    return output, torch.cat([hidden, later.last_hidden_state], 1)[mask], ids[mask]


def worth_sharing(prompts, counts) -> bool:
    """Whether enough tokens repeat other samples' prompts, and there is something behind the first token."""
    repeated = sum(map(len, prompts)) - sum(map(len, set(prompts)))
    return repeated > SHARE_FROM * (sum(map(len, prompts)) + sum(counts)) and max(counts) > 1


@torch.no_grad()
def can_share_prompts(model) -> bool:
    """Whether sharing leaves this model's log-probabilities as they are: it is tried."""
    if not all(type(layer) is DynamicLayer for layer in DynamicCache(config=model.config).layers):
        return False
    size = model.config.get_text_config().vocab_size
    ids = [number * 7919 % size for number in range(1, 20)]
    sequences, counts = [ids[:11], ids[:8] + ids[12:], ids[:8] + ids[11:13], ids[4:9]], [3, 7, 2, 1]
    found = []
    try:
        for model.shares_prompts in (False, True):
            found.append(policy.logprobs_and_entropy(model, sequences, counts, 1.0)[0])
    # a cache of its own kind, say
    except (TypeError, AttributeError, NotImplementedError, ValueError, RuntimeError):
        return False
    finally:
        model.shares_prompts = False
    return (found[1] - found[0]).abs().mean().item() < (1e-4 if found[0].device.type == "cpu" else 0.05)


def roomy(cache):
    """The same cache, empty, whose layers of full attention have room."""
    cache.layers = [RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


class RoomyLayer(DynamicLayer):
    """Keys and values of one layer in buffers with room: new ones are written there, nothing is copied."""

    room, buffers = 16, None

    def update(self, keys, values, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        start = self.get_seq_length()
        end = start + keys.shape[-2]
        # After a selection of rows `self.keys` is a tensor of its own, no longer the front of the buffer.
        stale = not self.buffers or self.keys.data_ptr() != self.buffers[0].data_ptr()
        if stale or end > self.buffers[0].shape[-2]:
            # On a GPU keys come in float32 (rotary positions), values in bf16; attention takes both in bf16.
            shapes = [(*new.shape[:-2], end + self.room, new.shape[-1]) for new in (keys, values)]
            self.buffers = [values.new_empty(shape) for shape in shapes]
            if start:
                self.buffers[0][..., :start, :], self.buffers[1][..., :start, :] = self.keys, self.values
        for buffer, new in zip(self.buffers, (keys, values)):
            buffer[..., start:end, :] = new
        self.keys, self.values = (buffer[..., :end, :] for buffer in self.buffers)
        return self.keys, self.values
