"""A function in verl's style: a rule, plus a discriminative model's score for correct answers."""

import aiohttp


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict,
    reward_router_address: str,
    reward_model_tokenizer,
):
    correct = solution_str.split("####")[-1].strip() == ground_truth
    if not correct:
        return {"score": 0.0, "acc": False}
    messages = [
        {"role": "user", "content": extra_info["question"]},
        {"role": "assistant", "content": solution_str},
    ]
    text = reward_model_tokenizer.apply_chat_template(messages, tokenize=False)
    if reward_model_tokenizer.bos_token is not None and text.startswith(reward_model_tokenizer.bos_token):
        text = text[len(reward_model_tokenizer.bos_token) :]
    body = {"model": "rm", "input": text, "use_activation": False}
    async with aiohttp.ClientSession() as session:
        async with session.post(f"http://{reward_router_address}/classify", json=body) as response:
            score = (await response.json())["data"][-1]["probs"][-1]
    return {"score": 1.0 + score, "acc": True, "rm_score": score}
