"""Sampling: in this process compared with transformers, on real vLLM servers compared with the trainer, and
the servers' weights.
"""

import asyncio
import math
import sys
import threading
import time
from types import SimpleNamespace

import aiohttp
import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import RawTestServer
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
)

import forked
import genrm_server
import rollout
from played import server
from test_reward_loop import serve  # noqa: F401  (a fixture)
from toy import warm_start
from tiny import PROMPTS, groups_of, policy_of, roll_out, samples_of, set_rewards


def test_greedy_rollout_is_what_transformers_generates(model):
    prompts = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]
    for sample in roll_out(model, prompts, group_size=1, temperature=0):
        expected = model.generate(
            torch.tensor([sample.prompt_ids]),
            attention_mask=torch.ones(1, len(sample.prompt_ids)),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=1,
            pad_token_id=0,
        )
        assert sample.response_ids == expected[0, len(sample.prompt_ids) :].tolist()


SMALL = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
OTHERS = {  # these cannot use the mask of full attention with rotary positions
    "sliding window": MistralConfig(**SMALL, intermediate_size=64, num_key_value_heads=1, sliding_window=4),
    "learnt positions": GPT2Config(**SMALL, bos_token_id=1, eos_token_id=1),
    "positions from the mask": BloomConfig(**SMALL),
}


def other_model(kind):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(OTHERS[kind]).eval()
    for weight in model.parameters():  # newly initialised, such small models hardly attend to earlier tokens
        torch.nn.init.normal_(weight, std=0.2)
    return model


@pytest.mark.parametrize("kind", ["ours", *OTHERS])
def test_rollout_logprobs_are_the_trainers(model, kind):
    model = other_model(kind) if kind in OTHERS else model
    # An untrained model hardly ever writes its own end token, but with many end tokens, rows are dropped.
    for temperature, ends in ((1.0, [1]), (1.3, [1]), (1.0, range(1, model.config.vocab_size, 4))):
        samples = roll_out(
            model,
            [[5, 6, 7], [8], [9, 10, 11, 12, 13]],
            group_size=3,
            temperature=temperature,
            eos_ids=ends,
            rollout_batch_size=6,
        )
        assert all(sample.response_ids for sample in samples)
        policy = policy_of(model, temperature=temperature, entropy_coef=1.0)
        for sample, logprobs in policy.logprobs_of(samples):
            assert torch.allclose(logprobs, torch.tensor(sample.rollout_logprobs), atol=1e-5)
            assert len(logprobs) == len(sample.response_ids)
        for _, _, entropy, mask in policy.forward(samples):
            assert entropy[mask].min() > 0 and entropy.max() < math.log(model.config.vocab_size)


def test_what_a_model_keeps_from_inference_mode_can_be_trained_with():
    """In this case, these are tables of rotary positions, which are recomputed when a text is longer than all
    before it.
    """
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    model = LlamaForCausalLM(
        LlamaConfig(**SMALL, intermediate_size=64, max_position_embeddings=8, rope_parameters=scaling)
    )
    policy = policy_of(model, group_size=2)
    before = policy.model.model.rotary_emb.inv_freq.clone()
    with torch.inference_mode():
        samples = set_rewards(roll_out(policy.model, [[5, 6, 7]], length=24), torch.tensor([[1.0, 0.0]]))
    assert not torch.equal(policy.model.model.rotary_emb.inv_freq, before)
    assert policy.update(groups_of(samples, 2), lr=1e-3)["actor/updates"] == 1
    assert all(parameter.grad is not None for parameter in policy.model.parameters())


def test_each_sample_is_reported_once_the_moment_it_ends(model):
    """A sample that ends early is reported before the others are complete, and includes its end token."""
    # An untrained model hardly ever writes its own end token.
    ends = set(range(1, model.config.vocab_size, 4))
    order = []
    samples = roll_out(
        model,
        [[5, 6, 7], [8]] * 4,
        4,
        length=6,
        eos_ids=ends,
        on_finished=lambda sample: order.append((id(sample), list(sample.response_ids))),
    )
    assert (
        sorted(order) == sorted((id(sample), sample.response_ids) for sample in samples) and len(order) == 32
    )
    lengths = [len(response) for _, response in order]
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1]  # shorter ones were reported first
    for sample in samples:
        assert len(sample.rollout_logprobs) == len(sample.response_ids)
        assert all(token not in ends for token in sample.response_ids[:-1])
        assert sample.response_ids[-1] in ends or len(sample.response_ids) == 6
        assert sample.truncated == (sample.response_ids[-1] not in ends)


def test_a_response_that_ends_at_the_limit_is_not_truncated(model):
    (ended,) = roll_out(model, [[5, 6, 7]], 1, length=1, eos_ids=range(model.config.vocab_size))
    (cut,) = roll_out(model, [[5, 6, 7]], 1, length=1, eos_ids=())
    assert ended.response_ids == cut.response_ids and not ended.truncated and cut.truncated


def test_sampling_follows_the_distribution_and_top_p():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).repeat(20_000, 1)
    generator = torch.Generator().manual_seed(0)
    tokens, logprobs = rollout.sample_tokens(logits, 1.0, 1.0, generator)
    expected = logits[0].softmax(-1)
    assert torch.allclose(tokens.bincount(minlength=4) / 20_000, expected, atol=0.015)
    assert torch.allclose(logprobs, expected.log()[tokens])
    # Since .64 + .24 > 0.7, the second token crosses the limit and stays.
    tokens, logprobs = rollout.sample_tokens(logits, 1.0, 0.7, generator)
    assert set(tokens.tolist()) == {0, 1}
    assert torch.allclose(logprobs, expected.log()[tokens])
    assert set(rollout.sample_tokens(logits, 1.0, 0.6, generator)[0].tolist()) == {0}
    assert set(rollout.sample_tokens(logits, 0, 1.0, generator)[0].tolist()) == {0}


# ---- on vLLM servers


PARAMETERS = {"temperature": 0.6, "top_p": 0.9, "logprobs": 0, "stop_token_ids": [1], "ignore_eos": True}
PARAMETERS |= {"max_tokens": 9}
ASKED = {  # whether the servers have the token endpoint -> what they get
    False: ("/v1/completions", PARAMETERS | {"prompt": [5, 6], "return_token_ids": True}),
    True: (
        "/inference/v1/generate",
        {"token_ids": [5, 6], "sampling_params": PARAMETERS | {"detokenize": False}},
    ),
}


@pytest.mark.parametrize("tokens", ASKED, ids=("completions", "tokens"))
@pytest.mark.parametrize(
    "script, tries",
    [
        (["cut", "500", "422", "abort", "fine"], 5),
        (["abort"] * 6, 6),
        (["400"], 1),
        (["short"], 1),
        (["filtered"], 1),
        (["hang"], 1),
    ],
)
def test_a_connection_that_is_cut_in_the_middle_is_tried_again_and_a_refusal_is_not(
    script, tries, tokens, serve, monkeypatch
):
    """Use a scripted HTTP server: half a response, errors, a response, and one that ends too soon.

    The router rejects a request with 422 if servers died of it, but another request may be the cause. A
    server that gets SIGTERM aborts its requests, and its answers to them have the status 200.
    """
    left, stop = list(script), threading.Event()

    async def play(request):
        act = left.pop(0)
        if act == "hang":
            stop.set()  # as an interrupted run does
            await asyncio.Event().wait()
        logprobs = {"token_logprobs": [-0.5, -0.25]}
        if tokens:
            logprobs = {"content": [{"token_id": 4, "logprob": -0.5}, {"token_id": 1, "logprob": -0.25}]}
        reason = {"short": "length", "abort": "abort", "filtered": "content_filter"}.get(act, "stop")
        choice = {"finish_reason": reason, "token_ids": [4, 1], "logprobs": logprobs}
        answer = web.json_response({"choices": [choice]}, status=int(act) if act.isdigit() else 200)
        if act == "cut":
            cut = web.StreamResponse(headers={"Content-Length": str(len(answer.body))})
            await cut.prepare(request)
            await cut.write(answer.body[: len(answer.body) // 2])
            request.transport.close()
            return cut
        return answer

    http = serve(play)
    sleep = asyncio.sleep
    monkeypatch.setattr(rollout.asyncio, "sleep", lambda seconds: sleep(seconds / 100))
    config = SimpleNamespace(api_key="old,new", num_servers=1)
    servers = SimpleNamespace(
        service=SimpleNamespace(router_address=http.address, config=config),
        check=lambda: None,
        has_token_endpoint=tokens,
    )
    (sample,), settings = (
        samples_of([[5, 6]], 1),
        dict(max_response_length=9, temperature=0.6, top_p=0.9, eos_ids={1}, rollout_batch_size=1, stop=stop),
    )
    if script[-1] != "fine":
        failure = {
            "400": "HTTP 400",
            "short": "ended after 2 of 9 tokens; raise --max-model-len in --rollout-vllm-args",
        }
        failure |= {"hang": "interrupted during rollouts", "abort": "the server aborted the request$"}
        failure |= {"filtered": "unknown finish_reason 'content_filter'"}
        with pytest.raises(RuntimeError, match=failure[script[0]]):
            rollout.rollout_vllm(servers, [sample], **settings)
    else:
        rollout.rollout_vllm(servers, [sample], **settings)
        assert sample.response_ids == [4, 1] and sample.rollout_logprobs == [-0.5, -0.25]
    assert list(zip(http.paths, http.requests)) == [ASKED[tokens]] * tries and http.keys == {"Bearer new"}


def test_a_time_limit_that_has_passed_is_told_and_waited_for_once_more_only(monkeypatch, capfd):
    """The limit may be hours. A 504 from the router says that it has passed."""
    asked = []

    async def hang(request):
        asked.append(request)
        error = {"message": "no response within --request-timeout 3600"}
        return web.json_response({"error": error}, status=504)

    async def ask():
        servers = SimpleNamespace(service=SimpleNamespace(router_address="host:1"), has_token_endpoint=False)
        async with RawTestServer(hang) as server, aiohttp.ClientSession(server.make_url("/")) as session:
            with pytest.raises(
                RuntimeError, match="HTTP 504: .*; for the policy's servers, lower --rollout-batch-size"
            ):
                await rollout.request_completion(session, servers, {"prompt": [1]})

    asyncio.run(ask())
    said = capfd.readouterr().out
    assert len(asked) == 2
    assert said.count("--request-timeout 3600") == 1 and "retrying the request once" in said


@pytest.mark.parametrize("size, ports", [(3, 1000), (512, 6)])
def test_the_batch_size_is_that_of_each_server_as_far_as_there_are_ports(size, ports, monkeypatch):
    """Two servers get three requests each.

    Six requests are running, and the others wait in the client, where no time limit applies.
    """
    monkeypatch.setattr(rollout, "MAX_CONNECTIONS", ports)
    together, most, lock, six = [0], [0], threading.Lock(), threading.Event()

    def answer(path, body):
        with lock:
            together[0] += 1
            most[0] = max(most[0], together[0])
            six.set() if most[0] == 6 else None
        six.wait(30)
        time.sleep(0.1)
        with lock:
            together[0] -= 1
        choice = {"finish_reason": "stop", "token_ids": [4], "logprobs": {"token_logprobs": [-0.5]}}
        return {"choices": [choice]}

    settings = dict(max_response_length=9, temperature=1.0, eos_ids={1}, rollout_batch_size=size)
    with server(answer) as address:
        config = SimpleNamespace(api_key="", num_servers=2)
        started = SimpleNamespace(router_address=address, config=config)
        servers = SimpleNamespace(service=started, check=lambda: None, has_token_endpoint=False)
        rollout.rollout_vllm(servers, samples_of([[5, 6]], 20), **settings)
    assert most[0] == 6


@pytest.mark.parametrize("flags, found", [("enable_scale_out: bool", True), ("tokens_only: bool", False)])
def test_the_token_endpoint_is_used_if_this_vllm_can_enable_it(flags, found, tmp_path, monkeypatch):
    file = tmp_path / "vllm/entrypoints/launchers/cli_args.py"
    file.parent.mkdir(parents=True)
    file.write_text(flags)
    (tmp_path / "vllm/__init__.py").touch()
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    assert rollout.can_enable_tokens() is found


def tied_policy(tokenizer):
    shape = warm_start.new_model(len(tokenizer), seed=3).config
    shape.tie_word_embeddings = True
    policy = policy_of(LlamaForCausalLM(shape))
    assert policy.model.lm_head.weight is policy.model.model.embed_tokens.weight
    return policy


def move(policy, scale):
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(scale * torch.randn_like(parameter))


def served_difference(servers, policy, temperature=1.0):
    """Return the mean difference of log-probabilities over 16 samples from the servers.

    Also checks the samples.
    """
    ends, finished, samples = {1, 20, 21, 22, 23, 24, 25}, [], samples_of(PROMPTS, 4)
    rollout.rollout_vllm(
        servers,
        samples,
        max_response_length=10,
        temperature=temperature,
        eos_ids=ends,
        rollout_batch_size=8,
        on_finished=lambda sample: finished.append(id(sample)),
    )
    assert sorted(finished) == sorted(map(id, samples))  # each sample was reported once
    assert all(len(sample.rollout_logprobs) == len(sample.response_ids) <= 10 for sample in samples)
    assert all(sample.response_ids[-1] in ends or len(sample.response_ids) == 10 for sample in samples)
    assert all(sample.truncated == (sample.response_ids[-1] not in ends) for sample in samples)
    policy.config.temperature = temperature
    differences = [
        logprobs - torch.tensor(sample.rollout_logprobs) for sample, logprobs in policy.logprobs_of(samples)
    ]
    return torch.cat(differences).abs().mean().item()


LOST_SYNC = r"server 0 .*: .*model.embed_tokens.weight.* resume the run"


@pytest.mark.slow
def test_stale_weights_on_the_servers_are_noticed_and_a_restarted_server_has_the_newest(
    tmp_path, tokenizer, monkeypatch
):
    """The model has tied embeddings, and vLLM is real. Servers and trainer agree, except before a sync.

    A lost sync is noticed even if the log-probabilities hardly change.
    """
    policy = tied_policy(tokenizer)
    settings = genrm_server.Config(model="", cpus="0", max_model_len=32, log_dir=tmp_path / "policy_logs")
    servers = rollout.PolicyServers(policy, tokenizer, settings)
    try:
        assert servers.has_token_endpoint  # This vLLM is 0.32 or newer.
        assert (
            served_difference(servers, policy) < 1e-5
            and served_difference(servers, policy, temperature=1.3) < 1e-5
        )
        move(policy, 0.02)
        stale = served_difference(servers, policy)
        servers.sync()
        # The prompts are the same again, so no keys or values of the old weights are left in a cache.
        assert stale > 0.02 > 1e-5 > served_difference(servers, policy)
        move(policy, 1e-6)
        with monkeypatch.context() as patch:
            patch.setattr(rollout, "RELOAD", rollout.RELOAD[1:])  # The server does not load the weights.
            with pytest.raises(RuntimeError, match=LOST_SYNC):
                servers.sync()
        (file,) = servers.folder.path.glob("*.safetensors")
        old = file.read_bytes()
        move(policy, 1e-6)
        with monkeypatch.context() as patch:
            write = servers.write_weights
            patch.setattr(servers, "write_weights", lambda: (write(), servers.folder.write(0, old)))
            with pytest.raises(RuntimeError, match=LOST_SYNC):  # The server loads the old file.
                servers.sync()
        assert served_difference(servers, policy) < 1e-3  # The log-probabilities do not show the lost sync.
        move(policy, 0.02)
        servers.sync()
        server = servers.service.slots[0].server
        server.env = forked.servers(server.env)
        server.child.kill()
        # The requests waited for the restarted server.
        assert served_difference(servers, policy) < 1e-5 and servers.service.slots[0].restarts == 1
    finally:
        servers.shutdown()
    assert not servers.folder.path.exists()


def test_any_seed_will_do(model):
    assert roll_out(model, [[5, 6, 7]], seed=8) != roll_out(model, [[5, 6, 7]], seed=7)
    assert roll_out(model, [[5, 6, 7]], seed=2**64 + 7) == roll_out(model, [[5, 6, 7]], seed=7)
    assert roll_out(model, [[5, 6, 7]], seed=-(2**70)) == roll_out(model, [[5, 6, 7]], seed=0)
