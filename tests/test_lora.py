"""LoRA adapters: what is trained and what stays frozen, the reference without adapters, and files for other
programs.
"""

import copy
import json
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    BloomConfig,
)

import causal_lm
import grpo_trainer
from played import lines_of
from policy import Policy
from rollout import check_sampling
from tiny import read_again, CPU, a_step, config_of, groups_of, policy_of, weights_of, with_sgd, write_model
from test_grpo_trainer import prepared, run_config, without_times, workshop  # noqa: F401
from test_policy import FAMILIES, of_family
from tools import merge_lora

IDS = torch.arange(3, 40)[None]


def learnt(model, steps=1, **changes):
    """Return a policy with trained adapters, and the samples of its last step."""
    policy = policy_of(model, lora_rank=4, **changes)
    for seed in range(steps):
        samples = a_step(policy.model, seed=seed)
        policy.update(groups_of(samples), lr=1e-2)
    return policy, samples


def test_only_adapters_learn_and_what_is_served_computes_the_same(model):
    """New adapters change nothing and depend on the seed alone. The weights have the same names and shapes as
    without adapters.
    """
    fresh, same, other = (policy_of(model, lora_rank=4, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(fresh.model(IDS).logits, model(IDS).logits)
    assert torch.equal(weights_of(fresh), weights_of(same))
    assert not torch.equal(weights_of(fresh), weights_of(other))
    policy, _ = learnt(model)
    base = model.state_dict()
    parameters = dict(policy.model.named_parameters())
    learning = {name for name, parameter in parameters.items() if parameter.requires_grad}
    assert len(learning) == 2 * 4 * 7 and all(".lora_" in name for name in learning)  # all but the head
    for name, parameter in parameters.items():
        if name not in learning:
            assert torch.equal(parameter, base[name.replace(".base_layer", "")]) and parameter.grad is None
    assert policy.optimizer_state().keys() == learning
    weights = dict(policy.weights())
    assert weights.keys() == base.keys()
    moved = {name for name, weight in weights.items() if not torch.equal(weight, base[name])}
    assert moved == {name for name in base if "_proj" in name}
    served = copy.deepcopy(model)
    served.load_state_dict(weights)
    own = policy.model(IDS).logits
    assert torch.allclose(served(IDS).logits, own, atol=1e-5)
    assert (own - model(IDS).logits).abs().max() > 0.01


@pytest.mark.parametrize("device, frozen", [("cpu", torch.float32), ("cuda", torch.bfloat16)])
def test_frozen_layers_alone_take_half_the_memory_on_a_gpu(model, device, frozen):
    """Only dtypes are set here, so no GPU is needed."""
    policy, _ = learnt(model)
    causal_lm.set_dtypes(policy.model, 4, device)
    for name, parameter in policy.model.named_parameters():
        is_frozen_layer = ".layers." in name and not parameter.requires_grad
        assert parameter.dtype == (frozen if is_frozen_layer else torch.float32), name


@pytest.mark.parametrize("lora_alpha, scale", [(12, 3.0), (0, 2.0)])
def test_a_layers_weight_is_its_own_plus_alpha_by_rank_times_b_a(model, lora_alpha, scale):
    policy = policy_of(model, lora_rank=4, lora_alpha=lora_alpha, lora_targets=("v_proj",))
    learning = {name: p for name, p in policy.model.named_parameters() if p.requires_grad}
    assert len(learning) == 2 * 4 and all(".self_attn.v_proj." in name for name in learning)
    layer = "model.layers.2.self_attn.v_proj"
    a, b = (learning[f"{layer}.lora_{which}.default.weight"] for which in "AB")
    torch.nn.init.normal_(b)
    expected = model.state_dict()[f"{layer}.weight"] + scale * b @ a
    assert torch.allclose(dict(policy.weights())[f"{layer}.weight"], expected, atol=1e-6)


@pytest.mark.slow
def test_the_reference_is_the_model_without_adapters(model):
    """The update equals one with a separate reference model, although no second model is kept."""
    policies = [with_sgd(policy_of(model, lora_rank=4, kl_coef=0.5)) for _ in range(2)]
    assert policies[0].reference is policies[0].model
    policies[1].reference = copy.deepcopy(model)
    policies[1].setup_model(policies[1].reference)
    samples, found = a_step(model), []
    for policy in policies:
        policy.update(groups_of(samples), lr=1.0)  # the adapters are no longer 0
        metrics = policy.update(groups_of(samples), lr=1.0)
        found.append((metrics, [p.detach().clone() for p in policy.model.parameters()]))
    assert found[0][0]["actor/kl_to_reference"] > 1e-3
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    for one, other in zip(found[0][1], found[1][1]):
        assert torch.allclose(one, other, atol=1e-6)


@pytest.mark.slow
def test_shared_prompts_and_checkpointing_give_the_same_update(model, monkeypatch):
    found = []
    samples = a_step(model, length=3)
    for options in ({}, {"gradient_checkpointing": True}):
        policy = with_sgd(policy_of(model, lora_rank=4, **options))
        assert policy.model.shares_prompts
        found.append((policy.update(groups_of(samples), lr=1.0), dict(policy.weights())))
    policy = with_sgd(policy_of(model, lora_rank=4))
    policy.model.shares_prompts = False
    found.append((policy.update(groups_of(samples), lr=1.0), dict(policy.weights())))
    for metrics, weights in found[1:]:
        assert metrics == pytest.approx(found[0][0], rel=1e-4, abs=1e-6)
        assert all(torch.allclose(weights[name], found[0][1][name], atol=1e-6) for name in weights)


@pytest.mark.slow
def test_checkpoints_hold_adapters_alone_and_peft_loads_them(model, tokenizer, tmp_path):
    """The merged folder contains the weights that the servers had, and a policy resumes seamlessly from a
    checkpoint.
    """
    base, saved, out = write_model(tmp_path / "base", model, tokenizer), tmp_path / "saved", tmp_path / "out"
    policy = Policy(config_of(model=base, lora_rank=4), base, CPU)
    samples = a_step(model)
    policy.update(groups_of(samples), lr=1e-2)
    policy.save(saved)
    tokenizer.save_pretrained(saved)
    assert not (saved / "model.safetensors").exists() and not (saved / "config.json").exists()
    size = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())
    assert size < 0.3 * sum(path.stat().st_size for path in Path(base).iterdir())
    others = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), saved).eval()
    assert torch.equal(others(IDS).logits, policy.model(IDS).logits)
    merge_lora.merge(saved, out, max_positions=4096)
    merged = load_file(out / "model.safetensors")
    weights = dict(policy.weights())
    for target in (saved, Path(base), Path(base, "..", "base"), tmp_path / "link"):
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to(base)
        before = {file: file.read_bytes() for file in target.iterdir() if file.is_file()}
        with pytest.raises(ValueError, match=f"^{target}: is the base model or a checkpoint with"):
            merge_lora.merge(saved, target)
        assert {file: file.read_bytes() for file in target.iterdir() if file.is_file()} == before
    assert merged.keys() == weights.keys()
    assert all(torch.equal(merged[name], weight) for name, weight in weights.items())
    assert AutoTokenizer.from_pretrained(out).chat_template == tokenizer.chat_template
    assert json.loads((out / "config.json").read_text())["max_position_embeddings"] == 4096
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [
        tokenizer.eos_token_id
    ]
    again = Policy(config_of(model=base, lora_rank=4), str(saved), CPU)
    again.load_optimizer(saved)
    for one in (policy, again):
        one.update(groups_of(a_step(model, seed=1)), lr=1e-2)
    for (name, got), (same, weight) in zip(again.model.named_parameters(), policy.model.named_parameters()):
        assert name == same and torch.equal(got, weight) and got.requires_grad == weight.requires_grad
    with pytest.raises(ValueError, match=f"^{base}: contains no adapters .*; pass a checkpoint of a run"):
        merge_lora.merge(Path(base), out)
    moved = Path(base).rename(tmp_path / "moved")
    with pytest.raises(
        ValueError, match=f"^{saved}: cannot be merged into {base} .*, pass its new path as --mo"
    ):
        merge_lora.merge(saved, out)
    merge_lora.merge(saved, out, str(moved))
    for content, why in ((b"torn", "header too small"), (None, "Repo id")):
        (saved / "adapter_model.safetensors").unlink()
        if content:
            (saved / "adapter_model.safetensors").write_bytes(content)
        with pytest.raises(ValueError, match=f"^{saved}: cannot be merged .*{why}.* pass another checkpoint"):
            merge_lora.merge(saved, out, str(moved))
    (saved / "adapter_config.json").write_text("{}")
    with pytest.raises(
        ValueError, match=f"^{saved}: adapter_config.json names no base model .* pass --model"
    ):
        merge_lora.merge(saved, out)


@pytest.mark.parametrize("content", ["{}", '{"base_model_name_or_path": null}', "[]", "", "[1"])
def test_adapters_that_name_no_base_model_are_rejected(tmp_path, content):
    (tmp_path / "adapter_config.json").write_text(content)
    message = rf"^{tmp_path}: adapter_config.json names no base model \(.*\); pass --model$"
    with pytest.raises(ValueError, match=message):
        merge_lora.merge(tmp_path, tmp_path / "out")


def test_a_base_model_whose_config_transformers_rejects_is_named_in_one_line(model, tokenizer, tmp_path):
    base, saved = write_model(tmp_path / "base", model, tokenizer), tmp_path / "saved"
    policy_of(model, lora_rank=4).save(saved)
    config = Path(base, "config.json")
    config.write_text(config.read_text().replace('"vocab_size": ', '"vocab_size": 0.5, "was": '))
    message = rf"^{saved}: cannot be merged into {base} \(--model {base}: .*'vocab_size'.*$"
    with pytest.raises(ValueError, match=message):
        merge_lora.merge(saved, tmp_path / "out", base)


PARTIAL = {"llama4_text": "Llama4Router", "qwen3_next": "Qwen3NextTopKRouter"}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_families_learn_with_adapters_or_their_experts_are_named(tmp_path, name):
    family_model = of_family(name, **FAMILIES[name])
    if name in PARTIAL:
        with pytest.raises(ValueError, match=rf"--lora-targets: [\w.]+ is a {PARTIAL[name]}, not a plain"):
            policy_of(family_model, lora_rank=4)
    targets = ("q_proj", "v_proj") if name in PARTIAL else ("all-linear",)
    policy, _ = learnt(family_model, lora_targets=targets)
    check_sampling(policy)
    served = read_again(policy, tmp_path)
    assert torch.allclose(served(IDS % 96).logits, policy.model(IDS % 96).logits, atol=1e-3)


def test_a_tied_head_has_no_adapter_and_is_served_as_it_is(model):
    shape = copy.deepcopy(model.config)
    shape.tie_word_embeddings = True
    tied = AutoModelForCausalLM.from_config(shape).eval()
    policy, _ = learnt(tied)
    weights = dict(policy.weights())
    assert torch.equal(weights["lm_head.weight"], tied.lm_head.weight)
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])

    with pytest.raises(ValueError, match="lm_head is a Linear, not a plain linear layer with its own weight"):
        # Merging it would change the embedding.
        policy_of(tied, lora_rank=4, lora_targets=("q_proj", "lm_head"))


def test_what_a_folder_of_the_base_model_may_lack_or_have_is_no_obstacle_to_merging(tmp_path, tokenizer):
    """The model may lack max_position_embeddings (Bloom), or have a temperature that transformers reads but
    does not write.
    """
    shape = BloomConfig(vocab_size=len(tokenizer), hidden_size=16, n_layer=1, n_head=2)
    base = Path(write_model(tmp_path / "base", AutoModelForCausalLM.from_config(shape), tokenizer))
    (base / "generation_config.json").write_text('{"temperature": 0.7}')
    config = config_of(model=str(base), lora_rank=4, lora_targets=("query_key_value",))
    policy = Policy(config, str(base), CPU)
    policy.update(groups_of(a_step(policy.model)), lr=1e-2)
    policy.save(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    merge_lora.merge(tmp_path / "saved", tmp_path / "out")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.allclose(merged(IDS).logits, policy.model(IDS).logits, atol=1e-5)


def test_the_merged_model_has_the_type_that_only_the_config_of_the_text_model_names(tmp_path, tokenizer):
    """So do the files of Qwen3-VL and Qwen3.5."""
    text = dict(vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1)
    text |= dict(num_attention_heads=2, num_key_value_heads=1, head_dim=8, layer_types=["full_attention"])
    vision = dict(hidden_size=16, intermediate_size=16, depth=1, num_heads=2, out_hidden_size=16)
    shape = AutoConfig.for_model("qwen3_5", text_config=text, vision_config=vision)
    whole = AutoModelForImageTextToText.from_config(shape, dtype=torch.bfloat16)
    base = write_model(tmp_path / "base", whole, tokenizer)
    config = json.loads((tmp_path / "base/config.json").read_text())
    assert config.pop("dtype") == config["text_config"]["dtype"] == "bfloat16"
    (tmp_path / "base/config.json").write_text(json.dumps(config))
    options = config_of(model=base, lora_rank=2, lora_targets=("q_proj",))
    Policy(options, base, CPU).save(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    merge_lora.merge(tmp_path / "saved", tmp_path / "out")
    (file,) = (tmp_path / "out").glob("*.safetensors")
    assert {tensor.dtype for tensor in load_file(file).values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"


def test_an_output_that_is_a_file_is_rejected_and_not_changed(model, tokenizer, tmp_path):
    base, saved, out = write_model(tmp_path / "base", model, tokenizer), tmp_path / "saved", tmp_path / "out"
    policy_of(model, lora_rank=4).save(saved)
    tokenizer.save_pretrained(saved)
    out.write_text("mine")
    with pytest.raises(ValueError, match=f"^{out}: is the base model .*, or a file; pass another directory$"):
        merge_lora.merge(saved, out, base)
    assert out.read_text() == "mine"


def saved_by_peft(model, tokenizer, folder, settings) -> Path:
    """Save the adapters of another program, without a tokenizer, and return their folder."""
    base = write_model(folder / "base", model, tokenizer)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings).save_pretrained(folder / "saved")
    return folder / "saved"


def test_adapters_without_a_tokenizer_get_that_of_the_base_model(model, tokenizer, tmp_path):
    saved = saved_by_peft(model, tokenizer, tmp_path, LoraConfig(r=4, task_type="CAUSAL_LM"))
    merge_lora.merge(saved, tmp_path / "out")
    merged = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert merged.get_vocab() == tokenizer.get_vocab()
    for file in (tmp_path / "base").glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ValueError, match=r"/saved: cannot be merged into .*tokenizer"):
        merge_lora.merge(saved, tmp_path / "unwritten")
    assert not (tmp_path / "unwritten").exists()


REPEATED = LoraConfig(r=4, layer_replication=[(0, 2), (1, 2)], task_type="CAUSAL_LM")


@pytest.mark.parametrize(
    "settings", [PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), REPEATED]
)
def test_adapters_that_cannot_be_merged_are_rejected_in_one_line(settings, model, tokenizer, tmp_path):
    saved = saved_by_peft(model, tokenizer, tmp_path, settings)
    with pytest.raises(
        ValueError, match="cannot be merged .*tunes a prompt or repeats layers, so it works only with peft"
    ):
        merge_lora.merge(saved, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_adapters_of_other_programs_on_a_tied_weight_are_rejected(model, tokenizer, tmp_path, target):
    """Merging them would change both the embedding and the head."""
    shape = copy.deepcopy(model.config)
    shape.tie_word_embeddings = True
    base = write_model(tmp_path / "base", AutoModelForCausalLM.from_config(shape), tokenizer)
    settings = LoraConfig(r=4, target_modules=["q_proj", target], task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings).save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    with pytest.raises(
        ValueError, match=rf"cannot be merged .*{target} shares its weight with another layer"
    ):
        merge_lora.merge(tmp_path / "saved", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_full_disk_ends_a_merge_with_one_line(model, tokenizer, tmp_path):
    """A limit on file sizes simulates a full disk: the kernel rejects the write in the same place."""
    base, saved = write_model(tmp_path / "base", model, tokenizer), tmp_path / "saved"
    policy_of(model, lora_rank=4).save(saved)
    tokenizer.save_pretrained(saved)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1][1]))
        with pytest.raises(OSError, match=f"^{tmp_path}/out: .*File too large.*; free some space, and merge"):
            merge_lora.merge(saved, tmp_path / "out", base)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before[1])
        signal.signal(signal.SIGXFSZ, before[0])


def test_targets_that_are_in_no_layer_are_named(model):
    with pytest.raises(ValueError, match="^--lora-targets: Target modules {'query'} not found"):
        policy_of(model, lora_rank=4, lora_targets=("query",))


@pytest.mark.parametrize("some_more", [0, 1])
def test_adapters_of_a_checkpoint_are_those_that_the_run_has(model, tmp_path, some_more):
    """Adapters must not be silently dropped or reinitialised."""
    targets = [("q_proj", "v_proj"), ("q_proj",)]
    before, after = targets[some_more], targets[1 - some_more]
    policy_of(model, lora_rank=4, lora_targets=before).save(tmp_path)
    model.save_pretrained(tmp_path / "base")
    config = config_of(model=str(tmp_path / "base"), lora_rank=4, lora_targets=after)
    message = r"--lora-targets [\w -]+: the adapters in .* are on different layers .*v_proj"
    with pytest.raises(ValueError, match=message):
        Policy(config, str(tmp_path), CPU)


def test_a_run_that_goes_on_with_another_rank_or_alpha_is_refused(model, tmp_path):
    """With a different alpha, the same adapters are a different policy, and nothing else would reveal it."""
    policy_of(model, lora_rank=4, lora_alpha=64).save(tmp_path)
    model.save_pretrained(tmp_path / "base")
    config = config_of(model=str(tmp_path / "base"), lora_rank=4)  # with alpha 8
    message = r"--lora-alpha .*: do not match .* \(rank 4, alpha 64\); pass the same"
    with pytest.raises(ValueError, match=message):
        Policy(config, str(tmp_path), CPU)
    config.lora_alpha = 64
    Policy(config, str(tmp_path), CPU)
    config.lora_rank = 2
    with pytest.raises(ValueError, match=message):
        Policy(config, str(tmp_path), CPU)


def test_a_run_says_which_layers_have_adapters(model):
    """If experts are not linear layers, all-linear leaves most of the model unchanged."""
    assert policy_of(model).model_info()["adapters"] == ""
    for targets in (("v_proj",), ("q_proj", "v_proj")):
        text = policy_of(model, lora_rank=4, lora_targets=targets).model_info()["adapters"]
        assert text == f"layers with adapters: {dict.fromkeys(targets, 4)}"
    shape = dict(num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_local_experts=8)
    shape |= dict(head_dim=8, num_attention_heads=4, num_key_value_heads=2, num_experts_per_tok=2)
    shape |= dict(vocab_size=96)
    text = policy_of(of_family("gpt_oss", **shape), lora_rank=4).model_info()["adapters"]
    assert text == "layers with adapters: {'q_proj': 2, 'k_proj': 2, 'v_proj': 2, 'o_proj': 2}"


@pytest.mark.slow
def test_the_merged_model_is_that_of_the_newest_checkpoint(workshop, monkeypatch):
    """Test merges that died before or during the work, and a base model that has moved since."""
    folder = workshop / "moves"
    shutil.copytree(workshop / "model", folder / "one")
    options = dict(lora_rank=8, lr=2e-2, resume="auto")

    def train(steps, model):
        config = run_config(workshop, "moving", total_steps=steps, model=str(folder / model), **options)
        grpo_trainer.train(config)
        return load_file(workshop / "moving/merged/model.safetensors")

    first = train(1, "one")
    (folder / "one").rename(folder / "two")
    page = workshop / "moving/report.html"
    for dies in ("load_causal_lm", "load_tokenizer"):
        page.unlink()
        with monkeypatch.context() as patched:
            patched.setattr(causal_lm, dies, None)
            with pytest.raises((AttributeError, TypeError)):
                train(2, "two")
        assert page.is_file()
        if dies == "load_causal_lm":  # the existing model is not that of step 1
            assert not Path(workshop, "moving/merged/model.safetensors").exists()
    second = train(2, "two")
    saved = Path(workshop, "moving/checkpoints/step_2")
    config = run_config(workshop, "moving", model=str(folder / "two"), **options)
    expected = dict(Policy(config, str(saved), CPU).weights())
    assert any(not torch.equal(first[name], weight) for name, weight in expected.items())
    assert all(torch.equal(second[name], weight) for name, weight in expected.items())


@pytest.mark.slow
def test_a_run_that_goes_on_is_the_uninterrupted_run_and_ends_as_one_model(workshop):
    options = dict(lora_rank=8, lr=2e-2, resume="auto", max_positions=1024)
    whole = run_config(workshop, "lora", total_steps=4, **options)
    stopped = run_config(workshop, "lora_stopped", total_steps=4, **options)
    grpo_trainer.train(whole)
    grpo_trainer.train(run_config(workshop, "lora_stopped", total_steps=2, **options))
    with pytest.raises(ValueError, match="--lora-rank 0: does not match .*step_2"):  # not a model by itself
        grpo_trainer.train(run_config(workshop, "lora_stopped", **options | {"lora_rank": 0}))
    grpo_trainer.train(stopped)
    shutil.rmtree(Path(stopped.out_dir, "merged"))  # as if the disk had been full
    grpo_trainer.train(stopped)
    metrics = [without_times(lines_of(Path(c.out_dir, "metrics.jsonl"))) for c in (whole, stopped)]
    assert metrics[0] == metrics[1] and any(line.get("actor/updates") for line in metrics[0])
    ends = [load_file(Path(config.out_dir, "merged/model.safetensors")) for config in (whole, stopped)]
    assert all(torch.equal(weight, ends[1][name]) for name, weight in ends[0].items())
    again = AutoModelForCausalLM.from_pretrained(Path(whole.out_dir, "merged"))
    assert again.config.max_position_embeddings == 1024
    saved = Path(whole.out_dir, "checkpoints/step_4")
    loaded = Policy(whole, str(saved), CPU)
    assert torch.allclose(again(IDS).logits, loaded.model(IDS).logits, atol=1e-5)


def test_a_scale_and_places_of_adapters_that_there_are_none_of_are_refused():
    for given, shown in (
        (dict(lora_alpha=64), "--lora-alpha 64"),
        (dict(lora_targets=("q_proj",)), "--lora-targets q_proj"),
    ):
        with pytest.raises(
            ValueError, match=f"^{shown}: has no effect without --lora-rank; pass both or neither$"
        ):
            config_of(**given).check()
