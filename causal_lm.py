"""A causal language model for training: loading, prompts, log-probabilities, gradient checkpointing, LoRA.

    model = load_causal_lm("PATH")
    logprobs_B_T, entropy_B_T = logprobs_and_entropy(model, sequences, counts, temperature=1.0)

policy.py trains the model, and rollout.py samples from it. Any model family that transformers can load works,
because the model's own forward turns hidden states into logits. LoRA uses peft.
Two optimizations do not change any result: an update computes each distinct prompt once (8 to 16 % less time
in the toy worlds), and rollouts write to a preallocated key-value cache (7 to 19 % less time there).
This file imports nothing from this repository.
Not covered: images, packed sequences, quantised weights, adapters on the experts of a mixture of experts.
Tensor names end in their shapes: B sequences in a micro-batch, T tokens in the longest response, N response
tokens in total, n tokens in a chunk, hidden size H, vocabulary size V.
"""

import contextlib
import inspect
import math
import re
import tempfile
import unicodedata
from collections import Counter
from functools import cache, partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    GradientCheckpointingLayer,
    PreTrainedTokenizerFast,
)
from transformers.cache_utils import DynamicLayer
from transformers.dynamic_module_utils import custom_object_save
from transformers.pytorch_utils import Conv1D
from transformers.utils import cached_file

# Weights whose names end like this are never rounded: the biases that route tokens to experts, and the decay
# rates of linear attention. vLLM keeps them in float32 whatever its dtype is, except A_log of Olmo-Hybrid.
FLOAT32_NAMES = ("e_score_correction_bias", "expert_bias", "A_log")
# Maximum number of float32 logits at a time. A forward and backward pass keeps five or six copies of them.
LOGITS_AT_ONCE = {"cpu": 2**25, "cuda": 2**28}
# Limit of check_logprobs in nats per token, for logits of up to 32.
ALLOWED_DIFFERENCE = {"cpu": 1e-3, "cuda": 0.1}
# Prompts are shared if repeated prompts contain more than this fraction of all tokens. With long answers, the
# attention mask that sharing requires costs as much as sharing saves.
SHARE_FROM = 0.25
# A text that tokenizers of different kinds split differently.
PROBE = "It's 10,250 m, or 3 acres:\n\n  def area(x, y):\treturn x * y  # \u00e9t\u00e9 \u6570\u5b66"


# ---- loading


def load_causal_lm(source: str, dtype="auto", trust_remote_code=False, max_positions=0):
    """Load a model in evaluation mode.

    Args:
        source: A Hugging Face folder or Hub name.
        dtype: The dtype of the loaded weights; "auto" keeps the stored dtype. It becomes float32 if the model
            would round constants to the stored dtype, such as the factor of Gemma's embeddings.
        trust_remote_code: Run the Python code that comes with the model.
        max_positions: The new value of max_position_embeddings; 0 keeps the model's value.

    Raises:
        ValueError: config.json cannot be read, the model is quantised, its positions would change with
            max_positions, or transformers could not save its settings.
    """
    # Nothing reads attention weights, and transformers would not save a config.json that asks for them.
    options = dict(dtype=dtype, trust_remote_code=trust_remote_code, output_attentions=False)
    config = read_config(source, trust_remote_code, max_positions).get_text_config()
    if getattr(config, "attn_logit_softcapping", None):
        options["attn_implementation"] = "eager"  # The other implementations ignore the cap.
    if max_positions:
        options["max_position_embeddings"] = max_positions
    model = AutoModelForCausalLM.from_pretrained(source, **options).eval()
    if dtype == "auto" and has_rounded_constants(model):
        return load_causal_lm(source, torch.float32, trust_remote_code, max_positions)
    make_savable(model, source)
    model.shares_prompts = False  # policy.py sets it to True for models that can share prompts.
    return model


class GenerateSettings(GenerationConfig):
    """Settings of transformers' generate() that can be saved as they were read."""

    def validate(self, *args, **kwargs) -> None:
        """Accept all settings. transformers would not save a temperature without do_sample."""


def make_savable(model, source: str) -> None:
    """Drop settings of transformers' generate() that transformers reads, but would not save.

    Nothing here calls generate(). Raises ValueError if the settings still cannot be saved.
    """
    settings = model.generation_config
    do_sample = settings.do_sample
    settings.do_sample = True  # A temperature without it is valid here.
    try:
        settings.validate(strict=True)
    except ValueError as error:
        for name in re.findall(r"^- `(\w+)`", str(error), re.MULTILINE):
            setattr(settings, name, None)
    settings.do_sample = do_sample  # A model that decodes greedily still does so.
    settings.__class__ = GenerateSettings
    try:
        with tempfile.TemporaryDirectory() as folder:
            model.config.save_pretrained(folder)
            settings.save_pretrained(folder)
    except OSError:  # The disk is full.
        raise
    except Exception as error:  # Each check of transformers raises its own type.
        why = " ".join(str(error).split())
        raise ValueError(
            f"--model {source}: transformers cannot save the model's settings ({why}); correct its "
            "config.json or generation_config.json"
        ) from error


def code_files(model) -> dict[str, bytes]:
    """Return the Python files of a model with code of its own, by name, and name them in its config."""
    if model._auto_class is None:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        return {file.name: file.read_bytes() for file in custom_object_save(model, folder, model.config)}


def has_rounded_constants(model) -> bool:
    """Return whether the model computed buffers in bf16 or fp16 that no file contains."""
    stored = model.state_dict()
    computed = [buffer for name, buffer in model.named_buffers() if name not in stored]
    return any(buffer.dtype in (torch.bfloat16, torch.float16) for buffer in computed)


def from_files(kind, source: str, trust_remote_code: bool):
    """Read a model's config or tokenizer. Raises ValueError if transformers cannot read a file."""
    try:
        return kind.from_pretrained(source, trust_remote_code=trust_remote_code)
    except Exception as error:  # Each check of transformers and tokenizers raises its own type.
        why = " ".join(str(error).split())
        if isinstance(error, ImportError):
            raise ValueError(f"--model {source}: {why}") from error
        if "trust_remote_code" in why and not trust_remote_code:
            raise ValueError(
                f"--model {source}: contains Python code of its own; read it, and pass --trust-remote-code "
                "to run it"
            ) from error
        raise ValueError(
            f"--model {source}: config.json or a file of the tokenizer cannot be read ({why}); if it is "
            "missing, truncated or changed, copy it again; if it is newer than transformers, update "
            "transformers; if it is on the Hub, check the name and the network"
        ) from error


def read_config(source: str, trust_remote_code=False, max_positions=0):
    """Read a model's config.json. Raises ValueError in the cases of load_causal_lm."""
    config = from_files(AutoConfig, source, trust_remote_code)
    for part in (config, config.get_text_config()):
        quantised = getattr(part, "quantization_config", None)
        if quantised:
            method = dict(quantised).get("quant_method", "quantization_config")
            raise ValueError(
                f"--model {source}: quantised weights ({method}) cannot be trained; pass the "
                "original model in bf16 or float32"
            )
    stored = getattr(config.get_text_config(), "max_position_embeddings", None)
    for rope in rotary_embeddings(config):
        kind = rope["rope_type"]
        # The ratio of this number to the original one scales all positions, also those of short texts.
        is_scaled = kind == "longrope" or kind == "yarn" and rope.get("factor") is None
        if is_scaled and max_positions not in (0, stored):
            raise ValueError(
                f"--max-positions {max_positions}: would change every position of {source}, "
                f"whose {kind} embedding is scaled by its max_position_embeddings ({stored}); "
                "omit --max-positions"
            )
    return config


def rotary_embeddings(config) -> list[dict]:
    """Return the parameters of the rotary embeddings: one dict, or one for each type of layer."""
    found = getattr(config.get_text_config(), "rope_parameters", None) or {}
    return [part for part in (found, *found.values()) if isinstance(part, dict) and "rope_type" in part]


def load_tokenizer(source: str, trust_remote_code: bool):
    """Load a tokenizer that splits text as the model's tokenizer.json does.

    transformers builds the tokenizer of some classes, such as Llama's, from the vocabulary alone. If the
    folder names such a class, but contains a byte-level tokenizer.json, all spaces would be lost. For a
    Mistral model with tekken.json, it builds one without a chat template. Raises ValueError if a file cannot
    be read, or if a model with tekken.json has no tokenizer.json.
    """
    tokenizer = from_files(AutoTokenizer, source, trust_remote_code)
    file = cached_file(source, "tokenizer.json", _raise_exceptions_for_missing_entries=False)
    if type(tokenizer).__name__ == "MistralCommonBackend":
        if not file:
            raise ValueError(
                f"--model {source}: has tekken.json, but no tokenizer.json; add tokenizer.json and "
                "tokenizer_config.json with a chat template, for example from a conversion of the model"
            )
        # Some of these files have a pattern that splits text differently from tekken.json.
        return PreTrainedTokenizerFast.from_pretrained(source, fix_mistral_regex=True)
    if not file or not type(tokenizer).__module__.startswith("transformers.models."):
        return tokenizer  # Code that comes with the model may do as it likes.
    stored = Tokenizer.from_file(file)
    stored.no_truncation()
    stored.no_padding()
    expected = stored.encode(PROBE, add_special_tokens=False).ids
    if tokenizer.encode(PROBE, add_special_tokens=False) == expected:
        return tokenizer
    print(
        f"--model {source}: {type(tokenizer).__name__} would split text differently from tokenizer.json, "
        "so tokenizer.json is used, also in checkpoints"
    )
    return PreTrainedTokenizerFast.from_pretrained(source)


def check_reading(tokenizer, text: str, ids: list[int]) -> None:
    """Raise ValueError if the tokens do not stand for the text, apart from special tokens and spelling.

    A tokenizer may normalise text, but it may not lose more than a tenth of the words or characters.
    """
    read = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    added = added_tokens(tokenizer)
    words = added.sub(" ", unicodedata.normalize("NFKC", text)).casefold().split()
    found = added.sub(" ", unicodedata.normalize("NFKC", read)).casefold().split()
    letters = Counter("".join(words))
    kept = letters & Counter("".join(found))
    if len(found) < 0.9 * len(words) or kept.total() < 0.9 * letters.total():
        raise ValueError(
            f"the tokenizer reads {text[:80]!r} as {read[:80]!r}; copy the tokenizer's files "
            "from the original model again"
        )


@cache
def added_tokens(tokenizer, shortest: int = 0) -> re.Pattern:
    """Return a pattern that matches every added token, such as <|end|>, of at least this length."""
    added = [text for text in tokenizer.get_added_vocab() if len(text.strip()) >= shortest]
    added.sort(key=len, reverse=True)
    return re.compile("|".join(map(re.escape, added)) or "(?!)")


def prompt_ids_of(row: dict, tokenizer, options: dict) -> list[int]:
    """Return the tokens of a row's prompt. If its last message is the assistant's, the policy continues it.

    Raises ValueError if the chat template rejects the prompt or drops its last message, or if the tokenizer
    does not keep the text.
    """
    messages = row["prompt"]
    last = messages[-1]
    is_prefilled = last["role"] == "assistant"
    ending = dict(add_generation_prompt=not is_prefilled, continue_final_message=is_prefilled)
    options = options | ending
    if row.get("tools"):
        options["tools"] = row["tools"]
    try:
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
    except Exception as error:  # A template is a program and may raise anything.
        why = " ".join(str(error).split())
        raise ValueError(f"the chat template rejects the prompt ({why}); change the prompt") from error
    # A template may rewrite the content, for instance as JSON, so compare the prompts of two contents.
    other = rendered
    if last["content"].strip():
        changed = [*messages[:-1], last | {"content": last["content"] + " and more"}]
        try:
            other = tokenizer.apply_chat_template(changed, tokenize=False, **options)
        except Exception:  # The template reads the content, because it rejects this one.
            other = None
    if other == rendered:
        raise ValueError(
            f"the chat template drops the last message ({last!r:.60}), because its content "
            "is empty or the template does not know its role; change the message"
        )
    check_reading(tokenizer, rendered, ids)
    return ids


def set_dtypes(model, lora_rank: int, device_type: str) -> None:
    """Convert all weights to float32, except that layers frozen by LoRA become bf16 on a GPU.

    The weights in FLOAT32_NAMES remain float32.
    """
    dtypes = dict.fromkeys(model.parameters(), torch.float32)
    if lora_rank and device_type == "cuda":
        for layer in layers_of(model, "--lora-rank"):
            for name, parameter in layer.named_parameters():
                if not (parameter.requires_grad or name.endswith(FLOAT32_NAMES)):
                    dtypes[parameter] = torch.bfloat16
    # Unlike a loop over parameters, _apply also works on sharded weights.
    model._apply(lambda tensor: tensor.to(dtypes.get(tensor, tensor.dtype)))


def can_share_prompts(model) -> bool:
    """Return whether the model can compute a prompt once for several sequences (shared_states)."""
    # A model that takes no positions may count the padding between a short prompt and its response.
    takes_positions = "position_ids" in inspect.signature(backbone(model).forward).parameters
    # All layers must cache the keys and values of all tokens.
    layers = DynamicCache(config=model.config).layers
    return takes_positions and all(type(layer) is DynamicLayer for layer in layers)


@torch.no_grad()
def check_logprobs(logprobs_function, model, name: str, device: torch.device) -> None:
    """Compare log-probabilities from `logprobs_function` with those of the model's own forward pass.

    The five sequences have two prompts. If the log-probabilities are wrong only because each prompt is
    computed once, that optimization is turned off. Most tokens follow the shorter prompt, which exposes
    models whose positions count padding.

    Args:
        logprobs_function: Either logprobs_and_entropy or a function with the same arguments.
        name: The model's name in the error message.
        device: The device that runs the model, even if the weights are in host memory.

    Raises:
        ValueError: The log-probabilities differ.
    """
    ids = list(range(1, 20))
    sequences = [ids[:11], ids[:8] + ids[12:], ids[:10], ids[4:7], ids[4:]]
    counts = [3, 7, 2, 1, 13]
    expected = []
    sizes = []
    for sequence, count in zip(sequences, counts):
        with precision(device):
            logits = model(input_ids=torch.tensor([sequence], device=device), use_cache=False).logits
        logits = logits[0, -count - 1 : -1].float()
        chosen = range(count), sequence[-count:]
        expected.append(logits.log_softmax(-1)[chosen])
        sizes.append(torch.maximum(logits[chosen].abs(), logits.max(-1).values.abs()))
    # On a GPU, these logits are in bf16, whose steps grow with their size.
    allowed = ALLOWED_DIFFERENCE[device.type] * max(1.0, torch.cat(sizes).mean().item() / 32)
    for _ in range(2):
        logprobs, _ = logprobs_function(model, sequences, counts, 1.0)
        difference = (logprobs[mask_of(counts, device)] - torch.cat(expected)).abs().mean().item()
        if difference < allowed:
            return
        model.shares_prompts = False
    raise ValueError(
        f"--model {name}: {type(model).__name__} cannot be trained, because the trainer's "
        f"log-probabilities differ from the model's own by {difference:.2g}; pass another "
        "model, or adapt causal_lm.logits_of"
    )


# ---- log-probabilities


def logprobs_and_entropy(
    model, sequences, counts, temperature, with_entropy=False, head_dtype=None, own_B_T=None
):
    """Return the log-probabilities and entropies of the response tokens, stacked as 2 x B x T.

    Padded positions and tokens that the policy did not write are 0. The logits are computed in chunks of at
    most LOGITS_AT_ONCE, because with a large vocabulary they need more memory than the layers.

    Args:
        sequences: The token ids of each prompt and its response.
        counts: The number of response tokens of each sequence.
        temperature: The divisor of the logits.
        with_entropy: Compute the entropies. If false, they are NaN, which exposes accidental use.
        head_dtype: The dtype of the operands of HeadProduct. None: the model's own forward makes the logits.
        own_B_T: True on the tokens that the policy wrote. None: the policy wrote the whole responses.
    """
    device = model.device
    compute_states = response_states
    if model.shares_prompts and worth_sharing(sequences, counts):
        compute_states = shared_states
    with precision(device):
        output, hidden_N_H, targets_N = compute_states(model, sequences, counts, device)
    mask = mask_of(counts, device)
    if own_B_T is not None:
        own_N = own_B_T[mask]
        hidden_N_H, targets_N, mask = hidden_N_H[own_N], targets_N[own_N], own_B_T
    compute_logits = partial(logits_of, model, output)
    if head_dtype:
        compute_logits = head_product(model, head_dtype)

    def of_chunk(hidden_n_H, targets_n):
        logits_n_V = compute_logits(hidden_n_H)
        if temperature != 1:  # Dividing by 1 would still copy the tensor.
            logits_n_V = logits_n_V / temperature
        logp_n_V = logits_n_V.log_softmax(-1)
        logprobs_n = logp_n_V.gather(-1, targets_n[:, None])[:, 0]
        entropy_n = torch.full_like(logprobs_n, math.nan)
        if with_entropy:  # With the clamp, an impossible token (-inf) adds 0, not NaN.
            entropy_n = -(logp_n_V.exp() * logp_n_V.clamp(min=torch.finfo(logp_n_V.dtype).min)).sum(-1)
        return torch.stack([logprobs_n, entropy_n])

    chunk = max(1, LOGITS_AT_ONCE[device.type] // model.config.get_text_config().vocab_size)
    compute_chunk = of_chunk
    if torch.is_grad_enabled() and len(targets_N) > chunk:  # The backward pass recomputes the logits.
        compute_chunk = partial(checkpoint, of_chunk, use_reentrant=False, preserve_rng_state=False)
    parts = []
    for hidden_n_H, targets_n in zip(hidden_N_H.split(chunk), targets_N.split(chunk)):
        parts.append(compute_chunk(hidden_n_H, targets_n))
    return torch.zeros(2, *mask.shape, device=device).masked_scatter(mask, torch.cat(parts, 1))


def response_states(model, sequences, counts, device):
    """Run the layers on whole sequences.

    Returns:
        The backbone's output, the hidden states that predict the response tokens (N x H), and the response
        tokens (N).
    """
    # Padding on the right is invisible to a causal model, so no attention mask is needed.
    ids = padded(sequences, device, torch.long)
    output = backbone(model)(input_ids=ids, use_cache=False)
    ends = torch.tensor([len(sequence) - 1 for sequence in sequences])[:, None]
    starts = ends - torch.tensor(counts)[:, None]
    columns = torch.arange(ids.shape[1] - 1)  # Each column predicts the token after it.
    chosen = on_device((starts <= columns) & (columns < ends), device)
    return output, output.last_hidden_state[:, :-1][chosen], ids[:, 1:][chosen]


def worth_sharing(sequences, counts):
    """Return whether enough prompt tokens are repeated and at least one response has two or more tokens."""
    if max(counts) == 1:
        return False
    prompts = [tuple(sequence[:-count]) for sequence, count in zip(sequences, counts)]
    repeated = sum(map(len, prompts)) - sum(map(len, set(prompts)))
    return repeated > SHARE_FROM * sum(map(len, sequences))


def shared_states(model, sequences, counts, device):
    """Return what response_states returns, but compute each distinct prompt only once.

    All responses to a prompt share its keys and values, which receive the gradients of all responses.
    """
    prompts = [sequence[:-count] for sequence, count in zip(sequences, counts)]
    responses = [sequence[-count:] for sequence, count in zip(sequences, counts)]
    cached = dict(past_key_values=DynamicCache(config=model.config), use_cache=True)

    # Prompts are padded on the right, so that every query attends to a key. A query of padding on the left
    # attends to none, which may give NaN gradients on a GPU.
    row_of_prompt, prompt_ids, prompt_mask = distinct_prompts(prompts, device)
    in_prompt = prompt_mask[row_of_prompt]
    lengths = in_prompt.sum(1, keepdim=True)
    output = backbone(model)(input_ids=prompt_ids, **cached)
    first = output.last_hidden_state[row_of_prompt[:, None], lengths - 1]  # predicts the first token
    cached["past_key_values"].reorder_cache(row_of_prompt)

    ids = padded(responses, device, torch.long)
    mask = mask_of(counts, device)
    attended = torch.cat([in_prompt, mask[:, :-1]], 1)
    positions = lengths + torch.arange(ids.shape[1] - 1, device=device)
    inputs = dict(attention_mask=attended, position_ids=positions, **cached)
    later = backbone(model)(input_ids=ids[:, :-1], **inputs)
    hidden = torch.cat([first, later.last_hidden_state], 1)
    return output, hidden[mask], ids[mask]


# ---- logits in rollouts


def new_cache(model):
    """Return an empty key-value cache. Its full-attention layers have spare room for new tokens."""
    cache = DynamicCache(config=model.config)
    for number, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:  # a full-attention layer
            cache.layers[number] = RoomyLayer()
    return cache


def next_logits(model, ids, attended, positions, cache):
    """Return the logits of the next token of each sequence (B x V), and add the new tokens to the cache.

    Args:
        ids: The new tokens of each sequence, left-padded.
        attended: The attention mask over the cached and the new tokens.
        positions: The positions of the new tokens.
        cache: The key-value cache of the earlier tokens.
    """
    inputs = dict(attention_mask=attended, position_ids=positions, past_key_values=cache, use_cache=True)
    output = backbone(model)(input_ids=ids, **inputs)
    return logits_of(model, output, output.last_hidden_state[:, -1])


class RoomyLayer(DynamicLayer):
    """The keys and values of a layer, in buffers with spare room that avoid a copy for each token."""

    room = 32
    front = False  # the used part of the key buffer; `update` sets `self.keys` to it

    def update(self, keys, values, *args, **kwargs):
        keys = keys.to(values.dtype)  # On a GPU, rotary embeddings return float32.
        start = self.get_seq_length()
        end = start + keys.shape[-2]
        # If rows were selected after the last update, `self.keys` is no longer the front of the buffer.
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


# ---- the model's own forward, in two parts


def precision(device, keep_casts=False):
    """Return a context that computes matrix products in bf16 on a GPU and in float32 on a CPU.

    On a GPU, float32 weights are cast to bf16 for each product. With keep_casts, each weight is cast only
    once, and the copy (2 bytes per parameter) is kept until the context ends.
    """
    return torch.autocast(device.type, torch.bfloat16, device.type == "cuda", keep_casts)


def backbone(model):
    """Return the module that computes the hidden states: all layers without the head."""
    body = getattr(model, "model", model.base_model)  # In Llama-4, base_model is a different module.
    return getattr(body, "decoder", body)  # OPT's layers are in a decoder inside the backbone.


def logits_of(model, output, hidden_N_H):
    """Return the logits (N x V, float32) for hidden states selected from the backbone's `output`.

    Model families differ in what follows the layers, such as soft caps, scales or another layer. Therefore,
    the model's own forward computes the logits, with its backbone replaced by a function that returns these
    hidden states.
    """
    body = backbone(model)
    output.last_hidden_state = hidden_N_H[None].float()
    body.forward = lambda *args, **kwargs: output
    try:
        with torch.autocast(hidden_N_H.device.type, enabled=False):
            ids = torch.zeros(1, len(hidden_N_H), dtype=torch.long, device=hidden_N_H.device)
            return model.forward(input_ids=ids, use_cache=False).logits[0].float()
    finally:
        del body.forward


# ---- a head with bf16 operands (--bf16-head)


class HeadProduct(torch.autograd.Function):
    """hidden_n_H @ weight_V_H.T with rounded operands, in the backward pass as well.

    Sums and results are float32. `rounded_V_H` is the weight in the operands' dtype.
    """

    @staticmethod
    def forward(ctx, hidden_n_H, weight_V_H, rounded_V_H):
        hidden_n_H = hidden_n_H.to(rounded_V_H.dtype)
        ctx.save_for_backward(hidden_n_H, rounded_V_H)
        return float32_product(hidden_n_H, rounded_V_H.T)

    @staticmethod
    def backward(ctx, gradient_n_V):
        hidden_n_H, rounded_V_H = ctx.saved_tensors
        gradient_n_V = gradient_n_V.to(rounded_V_H.dtype)
        weight_gradient_V_H = None
        if ctx.needs_input_grad[1]:  # LoRA freezes the head.
            weight_gradient_V_H = float32_product(gradient_n_V.T, hidden_n_H)
        return float32_product(gradient_n_V, rounded_V_H), weight_gradient_V_H, None


def float32_product(a, b):
    """Multiply bf16 matrices into a float32 matrix. On a CPU, which lacks this operation, cast them first."""
    if a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def head_product(model, dtype):
    """Return a function like logits_of for a plain head, with operands of this dtype."""
    weight_V_H = model.get_output_embeddings().weight
    rounded_V_H = weight_V_H.detach().to(dtype)  # once for all chunks
    return lambda hidden_n_H: HeadProduct.apply(hidden_n_H, weight_V_H, rounded_V_H)


@torch.no_grad()
def check_plain_head(model, device) -> None:
    """Raise ValueError if the head does more than multiply by its weight.

    Call this function after check_logprobs, which gathers the weights of a sharded model.
    """
    head = model.get_output_embeddings()
    is_plain = type(head) is torch.nn.Linear and head.bias is None  # An adapter makes it another class.
    if is_plain:
        with precision(device):
            output = backbone(model)(input_ids=torch.arange(1, 20, device=device)[None], use_cache=False)
        hidden_N_H = 100 * output.last_hidden_state[0]  # Soft caps are visible only in large logits.
        logits_N_V = logits_of(model, output, hidden_N_H)
        difference = (head_product(model, torch.bfloat16)(hidden_N_H) - logits_N_V).abs().max()
        is_plain = difference < 0.02 * logits_N_V.abs().max()  # false for NaN
    if not is_plain:
        raise ValueError(
            f"--bf16-head: does not work with {type(model).__name__}, whose head is more than a product (a "
            "bias, an adapter, a scale, a soft cap or another layer); omit --bf16-head"
        )


# ---- layers


@contextlib.contextmanager
def checkpointed_layers(model):
    """Inside this context, recompute layer activations in the backward pass to save memory.

    transformers' own switch is not used, because it needs training mode, in which some models use dropout.
    """
    layers = layers_of(model, "--gradient-checkpointing")
    shares = model.shares_prompts
    model.shares_prompts = False  # Recomputation would add the keys to the cache again.
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    try:
        yield
    finally:
        model.shares_prompts = shares
        for layer in layers:
            layer.forward = layer.forward.args[0]


def compile_layers(model, backend="inductor") -> None:
    """Compile each layer, which fuses its element-wise operations. Prompts are then not shared."""
    model.shares_prompts = False  # A cache as an argument would lead to further compilations.
    for layer in layers_of(model, "--compile-layers"):
        # Unlike what layer.compile() does, this also compiles a layer inside torch's checkpoint function.
        layer.forward = torch.compile(layer.forward, backend=backend, dynamic=True)


def layers_of(model, flag: str) -> list:
    """Return the layers that transformers marks for gradient checkpointing.

    Raises:
        ValueError: The model has no such layers; the message names the `flag` that needs them.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(
            f"{flag}: does not work with {type(model).__name__}, whose layers transformers does "
            f"not mark for gradient checkpointing; omit {flag}"
        )
    return layers


# ---- LoRA adapters (peft is imported late, because only some runs need it)


def add_adapters(model, options, source: str) -> None:
    """Freeze the model and add float32 adapters to its layers.

    If the checkpoint `source` has adapters, they are loaded. New adapters depend only on the seed. Because
    their matrix B starts at 0, they do not change the model at first.

    Args:
        options: An object with lora_rank, lora_alpha, lora_targets and seed (settings.PolicyOptions).
        source: A folder or Hub name.

    Raises:
        ValueError: A target is not a plain linear layer, or the checkpoint's adapters do not fit the options.
    """
    from peft import LoraConfig, set_peft_model_state_dict
    from peft.tuners.tuners_utils import cast_adapter_dtype

    targets = list(options.lora_targets)
    if "all-linear" in targets:
        targets = "all-linear"
    settings = LoraConfig(
        r=options.lora_rank,
        lora_alpha=options.lora_alpha or 2 * options.lora_rank,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    try:
        with torch.device(model.device):
            model.add_adapter(settings)
    except ValueError as error:
        raise ValueError(f"--lora-targets: {error}") from error
    cast_adapter_dtype(model, "default")
    torch.manual_seed(options.seed)
    for name, layer in adapter_layers(model).items():
        kind = type(layer.get_base_layer())
        # Experts are not linear layers, a router returns more than a product, and a tied head shares its
        # weight with the embedding.
        is_linear = issubclass(kind, (torch.nn.Linear, Conv1D)) and "Router" not in kind.__name__
        if not is_linear or is_tied(model, name):
            raise ValueError(
                f"--lora-targets: {name} is a {kind.__name__}, not a plain linear layer with "
                "its own weight; pass only linear layers, such as q_proj v_proj"
            )
        layer.reset_lora_parameters("default", True)
    saved = Path(source, "adapter_model.safetensors")
    if saved.is_file():
        before = LoraConfig.from_pretrained(source)
        if (before.r, before.lora_alpha) != (settings.r, settings.lora_alpha):
            raise ValueError(
                f"--lora-rank {settings.r} --lora-alpha {settings.lora_alpha}: do not match the "
                f"adapters in {source} (rank {before.r}, alpha {before.lora_alpha}); pass the "
                "same values"
            )
        found = set_peft_model_state_dict(model, load_file(saved))
        wrong = found.unexpected_keys + [name for name in found.missing_keys if ".lora_" in name]
        if wrong:
            raise ValueError(
                f"--lora-targets {' '.join(options.lora_targets)}: the adapters in {source} are "
                f"on different layers (such as {wrong[0]}); pass the same targets"
            )


def adapter_layers(model) -> dict:
    """Return the layers with adapters, by name."""
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def is_tied(model, name: str) -> bool:
    """Return whether the layer of this name shares its weight with another layer, as a tied head does."""
    return any(f"{name}.weight" in pair for pair in model.all_tied_weights_keys.items())


def count_adapters(model) -> str:
    """Summarise in one line how many layers of each name have an adapter."""
    kinds = Counter(name.rpartition(".")[2] for name in adapter_layers(model))
    return f"layers with adapters: {dict(kinds)}"


@contextlib.contextmanager
def without_adapters(model):
    """Turn off the adapters of the model, if it has any, inside this context.

    The adapters are scaled by 0. peft's own switch would also freeze them, which FSDP does not support.
    """
    layers = adapter_layers(model).values()
    try:
        for layer in layers:
            layer.set_scale("default", 0.0)
        yield
    finally:
        for layer in layers:
            layer.set_scale("default", 1.0)


@torch.no_grad()
def merged_weights(model):
    """Yield each weight with its adapter merged: its name in the base model and its tensor.

    The weight of a layer with an adapter is W + alpha / rank * B @ A, in float32. If W is sharded over ranks,
    the sum is sharded in the same way.
    """
    layers = adapter_layers(model)
    for name, tensor in model.state_dict().items():
        layer = layers.get(name.removesuffix(".base_layer.weight"))
        if layer is not None:
            tensor = tensor + layer.get_delta_weight("default")
        if ".lora_" not in name:
            yield name.replace(".base_layer.", "."), tensor


# ---- padding


def distinct_prompts(prompts, device, side="right"):
    """Pad the distinct prompts on one side.

    Returns:
        The row of each prompt among the distinct prompts, and the token ids and the mask of these rows.
    """
    rows = {}
    row_of_prompt = [rows.setdefault(tuple(prompt), len(rows)) for prompt in prompts]
    mask = mask_of(list(map(len, rows)), device)
    if side == "left":
        mask = mask.flip(1)
    return torch.tensor(row_of_prompt, device=device), padded(rows, device, torch.long, side), mask


def mask_of(lengths, device):
    """Return a mask (B x T) that is true on tokens and false on padding.

    Only lengths can tell them apart, because the padding token may also be the end token.
    """
    return on_device(torch.arange(max(lengths)) < torch.tensor(lengths)[:, None], device)


def padded(rows, device, dtype=torch.float32, side="right"):
    """Return rows of different lengths (lists or 1-d tensors) as one tensor, with zeros on one side."""
    rows = [torch.as_tensor(row, dtype=dtype) for row in rows]
    return on_device(pad_sequence(rows, batch_first=True, padding_side=side), device)


def on_device(tensor, device):
    """Copy a tensor to the device, without waiting for the work that a GPU has not yet done.

    While a GPU computes a micro-batch, the CPU can then make the tensors of the next one.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()  # From other memory, even this copy would wait.
    return tensor.to(device, non_blocking=device.type == "cuda")
