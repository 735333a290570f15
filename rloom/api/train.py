"""`rloom.train`: one run, called from Python."""

from collections.abc import Callable, Iterable
from typing import Any

from rloom.api.config import Source
from rloom.api.objects import configured
from rloom.api.report import Callback, after_step
from rloom.api.result import TrainResult, result_of
from rloom.launch.directory import claimed
from rloom.launch.run import Caller, run

TO_RESUME = 'To go on from the last checkpoint, call it again with the key "trainer.resume_mode": "auto".'


def train(
    config: Source = None,
    *,
    reward: Callable[..., Any] | None = None,
    train: Iterable[Any] | None = None,
    validation: Iterable[Any] | None = None,
    callbacks: Iterable[Callback] = (),
) -> TrainResult:
    """Train a policy. Without arguments: the embedded model on the embedded data.

    `config`: a mapping with dotted or nested keys, a list of "key=value" texts, the path of a YAML file, or a Config.
    `reward`: a function, called as `reward(data_source, solution_str, ground_truth, extra_info)`, or with lists as in
    TRL if it has a parameter `completions`. `train`, `validation`: rows with the columns of a data file, as a list of
    dicts, a datasets.Dataset or a pandas DataFrame. `callbacks`: called with a StepReport after each step; the run
    stops if one returns False or raises StopTraining.
    """
    checked, objects = configured(config, train=train, validation=validation, reward=reward)
    try:
        with claimed(checked) as own:
            return result_of(run(own, Caller(objects, after_step(list(callbacks)))))
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, KeyboardInterrupt) or getattr(error, "__notes__", []):  # a note names the checkpoint
            error.add_note(TO_RESUME)
        raise
