"""An agent that uses the openai package. The policy is behind `base_url`; each of its answers is trained."""

from openai import AsyncOpenAI  # imported here, once: the processes of the episodes are forked afterwards


async def agent(base_url, row, api_key, **kwargs):
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    messages = list(row["prompt"])
    for _ in range(2):
        answer = await client.chat.completions.create(model="policy", messages=messages, max_tokens=24)
        text = answer.choices[0].message.content or ""
        if text.strip().endswith(row["reward_model"]["ground_truth"]):
            return 1.0
        # The history is sent back as it was received. A history that was changed begins a branch.
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Wrong. Compute it again."}]
    return 0.0  # None: the run's reward scores the episode
