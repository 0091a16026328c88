"""Only makes it faster: delete this file, and every result is the same.

    shared_states   in the update: equal prompts of a micro-batch once (20-25 % less time with short answers)
    make_roomy      in rollouts: a key-value cache that is written into, not copied (8-40 % of a rollout)
    use_gqa         on CPU: keys that several query heads share are not copied for each of these heads

policy.py imports it where the file is there, and gives it what it needs. Whether a model can share prompts
is tried when it is loaded. Left out: compilation, attention kernels of our own, packing instead of padding
(slower on CPU). Needs none of our other files. Shapes as in policy.py.
"""

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.integrations import sdpa_attention

# Prompts are shared where at least this share of the tokens repeats others: sharing needs an attention mask,
# which costs as much as it saves when answers are long.
SHARE_FROM = 0.25

# ---- in the update


def shared_states(model, body, sequences, counts):
    """As policy.response_states, each distinct prompt computed once; None where it is not worth it.

    Keys and values of a prompt, and so their gradients, are shared by its responses.
    """
    prompts = []
    responses = []
    for sequence, count in zip(sequences, counts):
        start = len(sequence) - count
        prompts.append(tuple(sequence[:start]))
        responses.append(sequence[start:])
    if not getattr(model, "shares_prompts", False) or not worth_sharing(prompts, counts):
        return None
    device = next(model.parameters()).device
    numbers = {}  # of the distinct prompts
    prompt_of_row = [numbers.setdefault(prompt, len(numbers)) for prompt in prompts]
    prompt_of_row = torch.tensor(prompt_of_row, device=device)
    cache = DynamicCache(config=model.config)
    cached = dict(past_key_values=cache, use_cache=True)

    # All prompts end in the same column, so that all responses can start in the next one.
    ids = padded(numbers, "left", device)
    attended = padded([[1] * len(prompt) for prompt in numbers], "left", device)
    positions = (attended.cumsum(1) - 1).clamp(min=0)
    output = body(
        input_ids=ids,
        attention_mask=attended,
        position_ids=positions,
        **cached,
    )
    first = output.last_hidden_state[prompt_of_row, -1:]  # predicts the first token
    cache.reorder_cache(prompt_of_row)

    ids = padded(responses, "right", device)
    columns = torch.arange(ids.shape[1], device=device)
    mask = columns < torch.tensor(counts, device=device)[:, None]
    attended = torch.cat([attended[prompt_of_row], mask[:, :-1]], 1)
    positions = positions[prompt_of_row, -1:] + columns[1:]
    later = body(
        input_ids=ids[:, :-1],
        attention_mask=attended,
        position_ids=positions,
        **cached,
    )
    hidden = torch.cat([first, later.last_hidden_state], 1)
    return output, hidden[mask], ids[mask]


def padded(rows, side, device):
    tensors = [torch.tensor(row, device=device) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_side=side)


def worth_sharing(prompts, counts) -> bool:
    """Whether enough tokens repeat other samples' prompts, and there is something behind the first token."""
    if max(counts) == 1:
        return False
    in_prompts = sum(map(len, prompts))
    repeated = in_prompts - sum(map(len, set(prompts)))
    return repeated > SHARE_FROM * (in_prompts + sum(counts))


@torch.no_grad()
def can_share_prompts(model, logprobs_and_entropy) -> bool:
    """Whether sharing leaves this model's log-probabilities as they are: it is tried."""
    for layer in DynamicCache(config=model.config).layers:
        if type(layer) is not DynamicLayer:
            return False
    ids = list(range(1, 20))
    counts = [3, 7, 2, 1]
    sequences = [
        ids[:11],
        ids[:8] + ids[12:],
        ids[:10],
        ids[4:9],
    ]
    alone, _ = logprobs_and_entropy(model, sequences, counts, 1.0)
    model.shares_prompts = True
    try:
        shared, _ = logprobs_and_entropy(model, sequences, counts, 1.0)
    except (TypeError, AttributeError, ValueError, RuntimeError):  # a cache of its own kind, say
        return False
    finally:
        model.shares_prompts = False
    limit = 0.05
    if alone.device.type == "cpu":
        limit = 1e-4
    return (shared - alone).abs().mean().item() < limit


# ---- in rollouts


def make_roomy(cache) -> None:
    """An empty cache: its layers of full attention get room."""
    for number, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[number] = RoomyLayer()


class RoomyLayer(DynamicLayer):
    """Keys and values of one layer in buffers with room: new ones are written there, nothing is copied."""

    room = 32
    front = False  # of the buffer of keys: `self.keys` as `update` left it

    def update(self, keys, values, *args, **kwargs):
        keys = keys.to(values.dtype)  # on a GPU rotary positions leave them in float32
        start = self.get_seq_length()
        end = start + keys.shape[-2]
        # After a selection of rows `self.keys` is a tensor of its own.
        if self.keys is not self.front or end > self.key_buffer.shape[-2]:
            super().update(keys, values)
            self.key_buffer = pad(self.keys, (0, 0, 0, self.room))
            self.value_buffer = pad(self.values, (0, 0, 0, self.room))
        else:
            self.key_buffer[..., start:end, :] = keys
            self.value_buffer[..., start:end, :] = values
        self.front = self.keys = self.key_buffer[..., :end, :]
        self.values = self.value_buffer[..., :end, :]
        return self.keys, self.values


# ---- in attention

THEIR_USE_GQA = sdpa_attention.use_gqa_in_sdpa


def use_gqa(mask, key, *value) -> bool:
    """Whether attention gets keys as they are: as transformers says, on CPU as if there were no mask."""
    if key.device.type == "cpu":
        mask = None
    return THEIR_USE_GQA(mask, key, *value)


sdpa_attention.use_gqa_in_sdpa = use_gqa  # for every model of this process
