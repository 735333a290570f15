"""The command `huggingface-cli` of guides.

In the versions of huggingface_hub that rloom needs it does not exist, or only says that it no longer works: `hf` does
the same.
"""

import sys

ACCOUNT = ("login", "logout", "whoami")  # `hf` has them below `auth`


def main() -> None:
    """`huggingface-cli download Qwen/Qwen2.5-0.5B-Instruct` as `hf download Qwen/Qwen2.5-0.5B-Instruct`."""
    from huggingface_hub.cli.hf import main as hf

    given = sys.argv[1:]
    sys.argv = ["hf", *(["auth"] if given[:1] and given[0] in ACCOUNT else []), *given]
    print(f"huggingface-cli is now: {' '.join(sys.argv)}", file=sys.stderr)
    hf()
