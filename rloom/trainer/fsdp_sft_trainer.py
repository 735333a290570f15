"""`python -m rloom.trainer.fsdp_sft_trainer key=value ...`: verl's older name of `rloom sft`."""

import sys

from rloom.trainer.sft_trainer import main

if __name__ == "__main__":
    sys.exit(main())
