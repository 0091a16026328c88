"""A function in the style of verl's Reward Loop: a judge grades GSM8K answers with a mark from 1 to 10."""

import aiohttp

PROMPT = """Here is a problem and a solution to it. Mark the solution from 1 (wrong) to 10 (flawless).

Problem: {problem}

Solution: {solution}

End with a blank line and the mark alone."""


async def chat(router_address: str, request: dict) -> dict:
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        async with session.post(f"http://{router_address}/v1/chat/completions", json=request) as response:
            response.raise_for_status()
            return await response.json()


async def compute_score_gsm8k(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict,
    reward_router_address: str,
    reward_model_tokenizer,
):
    request = {
        "model": "judge",
        "messages": [
            {"role": "user", "content": PROMPT.format(problem=extra_info["question"], solution=solution_str)}
        ],
        "temperature": 0.7,
        "max_tokens": 4096,
    }
    answer = await chat(reward_router_address, request)
    text = answer["choices"][0]["message"]["content"]
    try:
        mark = int(text.split("\n\n")[-1].strip())
    except ValueError:
        mark = 0
    return {"score": mark, "acc": mark == 10, "genrm_response": text}
