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


def shared_states(model, body, sequences, counts, left_padded):
    """As policy.response_states, each distinct prompt computed once; None where it is not worth it.

    Keys and values of a prompt, and so their gradients, are shared by its responses.
    """
    prompts = []
    responses = []
    for sequence, count in zip(sequences, counts):
        prompts.append(tuple(sequence[:-count]))
        responses.append(torch.tensor(sequence[-count:]))
    if not model.shares_prompts or not worth_sharing(prompts, counts):
        return None
    device = model.device
    cached = dict(past_key_values=DynamicCache(config=model.config), use_cache=True)

    prompt_of_row, ids, attended, positions = left_padded(prompts, device)
    output = body(input_ids=ids, attention_mask=attended, position_ids=positions, **cached)
    first = output.last_hidden_state[prompt_of_row, -1:]  # predicts the first token
    cached["past_key_values"].reorder_cache(prompt_of_row)

    ids = pad_sequence(responses, batch_first=True).to(device)
    columns = torch.arange(ids.shape[1], device=device)
    mask = columns < torch.tensor(counts, device=device)[:, None]
    attended = torch.cat([attended[prompt_of_row], mask[:, :-1]], 1)
    positions = positions[prompt_of_row, -1:] + columns[1:]
    later = body(input_ids=ids[:, :-1], attention_mask=attended, position_ids=positions, **cached)
    hidden = torch.cat([first, later.last_hidden_state], 1)
    return output, hidden[mask], ids[mask]


def worth_sharing(prompts, counts):
    """Whether enough tokens repeat other samples' prompts, and there is something behind the first token."""
    if max(counts) == 1:
        return False
    in_prompts = sum(map(len, prompts))
    repeated = in_prompts - sum(map(len, set(prompts)))
    return repeated > SHARE_FROM * (in_prompts + sum(counts))


def can_share_prompts(model):
    """Whether all of a model's layers keep keys and values of every token. policy.py tries it, too."""
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=model.config).layers)


# ---- in rollouts


def make_roomy(cache):
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


def use_gqa(mask, key, *value):
    """Whether attention gets keys as they are: as transformers says, on CPU as if there were no mask."""
    if key.device.type == "cpu":
        mask = None
    return THEIR_USE_GQA(mask, key, *value)


sdpa_attention.use_gqa_in_sdpa = use_gqa  # for every model of this process
