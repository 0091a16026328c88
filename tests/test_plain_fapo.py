"""docs/plain_fapo.py: its first step has the rewards and advantages of grpo_trainer.py."""

import json
import zlib
from types import SimpleNamespace

import pytest

import grpo_trainer
from played import says, server
from policy import Policy
from test_recipes import load


def judge(path, body):
    """Find a wrong paragraph in about half of the solutions."""
    text = json.dumps(body["messages"])
    return says("\\boxed{0}" if zlib.crc32(text.encode()) % 2 else "\\boxed{-1}")


@pytest.mark.slow
def test_the_first_step_is_the_trainers(tmp_path, monkeypatch, capsys, one_ray):
    """A scripted judge replaces vLLM. The trainer shuffles its file, whose rows are therefore placed so that
    both draw the same rows in the same order.
    """
    plain = load("docs/plain_fapo")
    steps, update = [], Policy.update

    def recorded(policy, groups, *arguments, **options):
        samples = sum(groups, [])
        steps.append([(one.response_ids, one.result["reward_score"], one.advantage) for one in samples])
        return update(policy, groups, *arguments, **options)

    monkeypatch.setattr(Policy, "update", recorded)
    rows = plain.problems(1)
    placed = dict(zip(grpo_trainer.draw(range(plain.PROMPTS), 0, plain.PROMPTS, seed=0), rows))
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(placed[number]) + "\n" for number in range(plain.PROMPTS)))
    with server(judge) as address:
        served = SimpleNamespace(router_address=address, shutdown=lambda: None)
        monkeypatch.setattr(plain.genrm_server, "ModelServers", lambda config: served)
        plain.main(steps=1)
        assert "step 1: accuracy 0." in capsys.readouterr().out
        config = grpo_trainer.Config(
            model=plain.MODEL,
            train_file=str(file),
            out_dir=str(tmp_path / "run"),
            reward_fn=plain.FAPO,
            reward_kwargs=plain.ASK,
            router_address=(address,),
            total_steps=1,
            train_batch_size=plain.PROMPTS,
            mini_batch_size=plain.OPTIONS.mini_batch_size,
            group_size=plain.GROUP,
            max_response_length=64,
            overlong_buffer=0,
            lr=plain.OPTIONS.lr,
            adam_betas=plain.OPTIONS.adam_betas,
            weight_decay=0.0,
            lr_warmup_steps=0,
            num_threads=1,
            num_workers=1,
            save_every=0,
            device="cpu",
        )
        grpo_trainer.train(config)
    ours, theirs = steps
    assert ours == theirs
    assert {reward for _, reward, _ in ours} == {-1.0, 0.0, 1.0}
