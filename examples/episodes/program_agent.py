"""A program as the agent, here in Python without a package; it can be in any language.

The row is JSON on the standard input, the policy's address is in OPENAI_BASE_URL, the last line printed is the reward.
"""

import json
import os
import sys
from urllib.request import Request, urlopen

row = json.load(sys.stdin)
body = json.dumps({"model": "policy", "messages": row["prompt"], "max_tokens": 24}).encode()
request = Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    body,
    {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
answer = json.load(urlopen(request))["choices"][0]["message"]["content"] or ""
print(float(answer.strip().endswith(row["reward_model"]["ground_truth"])))
