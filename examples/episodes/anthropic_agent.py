"""An agent that uses the anthropic package, which finds the policy by ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY."""

from anthropic import AsyncAnthropic


async def agent(base_url, row, **kwargs):
    messages = list(row["prompt"])
    async with AsyncAnthropic() as client:
        for _ in range(2):
            answer = await client.messages.create(model="policy", messages=messages, max_tokens=24)
            text = "".join(block.text for block in answer.content if block.type == "text")
            if text.strip().endswith(row["reward_model"]["ground_truth"]):
                return 1.0
            messages += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": "Wrong. Compute it again."},
            ]
    return 0.0
