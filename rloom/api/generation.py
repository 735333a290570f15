"""`rloom.generate`, and the models that it and `rloom chat` accept."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rloom.api.config import load_config
from rloom.config.from_checkpoint import MODEL_ALONE, consent_keys, load_saved
from rloom.config.load import fitting_lengths
from rloom.config.schema import Config
from rloom.environments.kinds import MULTI_TURN
from rloom.episodes.kinds import AGENT, ENVIRONMENT_KEY
from rloom.episodes.runner import EpisodeRunner
from rloom.errors import CheckpointError, ConfigError, DataError
from rloom.launch.directory import open_checkpoint
from rloom.launch.episodes import open_episodes
from rloom.launch.generation import TextGenerator, context_of, open_generator
from rloom.rollout.base import Sampling
from rloom.training.checkpoint import Checkpoints
from rloom.training.sampling import draw_seed
from rloom.types import Prompt

MODEL = "actor_rollout_ref.model.path"
ENGINE = "actor_rollout_ref.rollout.name"
EPISODES = (*MODEL_ALONE, *(path for path in consent_keys() if path.startswith((f"{MULTI_TURN}.", f"{AGENT}."))))
SAVED = "saved"
ONE_GPU = ("trainer.n_gpus_per_node=1",)
KWARGS = "actor_rollout_ref.rollout.engine_kwargs"  # the hf engine passes them to generate(), which takes code


def generate(
    model: str | Path,
    prompts: str | Sequence[str | Sequence[Mapping[str, Any]]],
    *,
    max_new_tokens: int | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = -1,
    seed: int = 0,
    keys: Sequence[str] = (),
) -> list[str]:
    """One answer to each prompt, a text or a list of chat messages.

    `model`: a checkpoint (global_step_N), a run directory, a Hugging Face folder or a hub name. `max_new_tokens`: by
    default data.max_response_length. `temperature=0` is greedy. `keys`: "key=value" changes to the configuration.
    """
    if isinstance(prompts, str):
        raise DataError(f"prompts is a text; give a list, [{prompts[:40]!r}]")
    with open_model(model, keys) as generator:
        sampling = sampling_of(generator, max_new_tokens, temperature, top_p, top_k)
        return generator.answers(list(prompts), sampling, seed)


def sampling_of(
    generator: TextGenerator, max_new_tokens: int | None, temperature: float, top_p: float = 1.0, top_k: int = -1
) -> Sampling:
    limit = generator.max_new_tokens if max_new_tokens is None else max_new_tokens
    for name, value, is_right, rule in (
        ("max_new_tokens", limit, limit >= 1, "1 or more"),
        ("temperature", temperature, temperature >= 0, "0 (greedy) or more"),
        ("top_p", top_p, 0 < top_p <= 1, "a number above 0, up to 1"),
        ("top_k", top_k, top_k == -1 or top_k >= 1, "-1 (the whole vocabulary), or 1 or more"),
    ):
        if not is_right:
            raise ConfigError(f"{name}={value}: use {rule}")
    whole = generator.max_length if max_new_tokens is None else None
    return Sampling(limit, temperature, top_p, top_k, generator.stop_ids, max_length=whole)


@contextmanager
def open_model(model: str | Path, keys: Sequence[str] = ()) -> Iterator[TextGenerator]:
    config, checkpoint = located(model, keys)
    with open_generator(config, checkpoint) as generator:
        yield generator


@contextmanager
def open_episode_session(
    model: str | Path, environment: str, keys: Sequence[str] = (), *, row: Mapping[str, Any] | None = None
) -> Iterator["EpisodeSession"]:
    """`environment`: a name or file.py:name, or `saved`: what the run of the checkpoint had. `row`: further columns."""
    if environment != SAVED:
        keys = [f"{ENVIRONMENT_KEY}={quoted(environment)}", *keys]
    config, checkpoint = located(model, keys, uses=EPISODES if environment == SAVED else MODEL_ALONE)
    with open_generator(config, checkpoint) as generator, open_episodes(config, generator.tokenizer) as runner:
        if runner is None:
            raise ConfigError(f"{model} was trained without an environment, tools or an agent: use --environment NAME")
        yield EpisodeSession(generator, runner, row or {})


class EpisodeSession:
    """Episodes of a policy and an environment. Each begins with a prompt."""

    def __init__(self, generator: TextGenerator, runner: EpisodeRunner, row: Mapping[str, Any]) -> None:
        self.generator, self._runner, self._row = generator, runner, row

    def watch(self, text: str, sampling: Sampling, seed: int) -> Generator[str, None, None]:
        """What happens, as text in pieces."""
        messages = ({"role": "user", "content": text},)
        prompt = Prompt(0, messages, text, (), "chat", columns={"prompt": messages, **self._row})
        return self.generator.episode(self._runner, prompt, sampling, seed)


def located(model: str | Path, keys: Sequence[str], uses: Sequence[str] = MODEL_ALONE) -> tuple[Config, Path | None]:
    """The configuration, and the checkpoint if it is one."""
    folder = Path(model).expanduser()
    checkpoint = checkpoint_in(folder) if folder.is_dir() else None
    if checkpoint is None:
        return of_pretrained([f"{MODEL}={quoted(str(model))}"], keys), None
    open_checkpoint(checkpoint)
    engine = [f"{ENGINE}=native"]  # the run's own engine may be one that starts servers
    config = load_saved(checkpoint, keys, uses=uses, settings=engine)
    if config.actor_rollout_ref.rollout.kind.takes_engine_kwargs:
        config = load_saved(checkpoint, keys, uses=(*uses, KWARGS), settings=engine)
    return config, checkpoint


def of_pretrained(model: Sequence[str], keys: Sequence[str]) -> Config:
    """With lengths that fit the model, unless `keys` set them. Of a hub name, the context is downloaded."""
    config = load_config([*ONE_GPU, *model, *keys])
    lengths = fitting_lengths(config, context_of(config))
    return load_config([*ONE_GPU, *model, *lengths, *keys]) if lengths else config


def checkpoint_in(folder: Path) -> Path | None:
    """The checkpoint that a folder is, or the newest of a run directory; None: a Hugging Face folder."""
    if (folder / "config.json").is_file():
        return None
    if (folder / "actor").is_dir():
        return folder
    steps = Checkpoints(folder, keep={}).steps()
    if not steps:
        raise CheckpointError(
            f"{folder} is no checkpoint (global_step_N), no run directory with checkpoints, and no Hugging Face folder "
            "(it has no config.json)"
        )
    return Checkpoints(folder, keep={}).path(steps[-1])


def quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


class ChatSession:
    """Turns of a user and the model. Each answer depends on all turns before it."""

    def __init__(
        self, generator: TextGenerator, sampling: Sampling, *, system: str | None = None, seed: int = 0
    ) -> None:
        self._generator, self._sampling, self._seed = generator, sampling, seed
        self._start = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._start)

    def reset(self) -> None:
        self.messages = list(self._start)

    def answer(self, text: str) -> Generator[str, None, None]:
        """The answer in pieces. Closed early, what was generated by then is the answer."""
        turns = [*self.messages, {"role": "user", "content": text}]
        pieces: list[str] = []
        try:
            for piece in self._generator.stream(turns, self._sampling, draw_seed(self._seed, "chat", len(turns))):
                pieces.append(piece)
                yield piece
        finally:
            if pieces:
                self.messages = [*turns, {"role": "assistant", "content": "".join(pieces)}]
