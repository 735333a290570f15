"""Conversations in the tokens of a reward model: by its chat template, or as a pair of question and answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from rloom.types import Message, Sample, Score

LARGEST_LIMIT = 1_000_000  # a tokenizer without a limit has a model_max_length of 1e30


@dataclass(frozen=True)
class Conversation:
    tokens: tuple[int, ...]
    segments: tuple[int, ...] | None = None  # token_type_ids, for models that tell question from answer by them
    truncated: bool = False


class ConversationEncoder:
    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_length: int | None, truncation: str) -> None:
        """`truncation`: error, left or right. Encoding that fails is a failed Score."""
        self.tokenizer, self.max_length, self.truncation = tokenizer, max_length, truncation
        if truncation != "error":
            tokenizer.truncation_side = truncation

    def encode(self, samples: Sequence[Sample]) -> list[Conversation | Score]:
        """One entry for each sample, in order."""
        if not samples:
            return []
        found = self.pairs(samples) if self.tokenizer.chat_template is None else self.chats(samples)
        return [self.checked(one) if isinstance(one, Conversation) else one for one in found]

    def chats(self, samples: Sequence[Sample]) -> list[Conversation | Score]:
        found: list[Conversation | Score | None] = [None] * len(samples)
        texts: dict[int, str] = {}
        for row, sample in enumerate(samples):
            try:
                texts[row] = self.rendered(sample)
            except (TemplateError, TypeError, ValueError) as error:  # templates raise errors to refuse messages
                found[row] = Score.failed(f"the reward model's chat template refuses the conversation: {error}")
        # templates write the special tokens themselves
        encoded = self.tokenizer(list(texts.values()), add_special_tokens=False, verbose=False) if texts else {}
        for row, tokens in zip(texts, encoded.get("input_ids", ()), strict=True):
            found[row] = self.shortened(tokens)
        return [one for one in found if one is not None]

    def rendered(self, sample: Sample) -> str:
        messages = [dict(message) for message in (*messages_of(sample), *sample.answer_messages)]
        text: str = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
        return text

    def shortened(self, tokens: list[int]) -> Conversation:
        if self.max_length is None or len(tokens) <= self.max_length or self.truncation == "error":
            return Conversation(tuple(tokens))
        kept = tokens[-self.max_length :] if self.truncation == "left" else tokens[: self.max_length]
        return Conversation(tuple(kept), truncated=True)

    def pairs(self, samples: Sequence[Sample]) -> list[Conversation | Score]:
        questions = ["\n".join(map(message_text, messages_of(sample))) for sample in samples]
        answers = ["\n".join(map(message_text, sample.answer_messages)) for sample in samples]
        encoded = self.tokenizer(questions, answers, verbose=False)
        found: list[Conversation | Score] = []
        for row, tokens in enumerate(encoded["input_ids"]):
            if self.max_length is None or len(tokens) <= self.max_length or self.truncation == "error":
                found.append(pair(encoded, row))
            else:
                found.append(self.shortened_pair(questions[row], answers[row]))
        return found

    def shortened_pair(self, question: str, answer: str) -> Conversation | Score:
        """left: without the beginning of the question; right: without the end of the answer."""
        part = "only_first" if self.truncation == "left" else "only_second"
        try:
            encoded = self.tokenizer([question], [answer], truncation=part, max_length=self.max_length, verbose=False)
        except Exception as error:  # raised by the tokenizers library: the part is too short to remove so much of it
            side = "question" if self.truncation == "left" else "answer"
            return Score.failed(
                f"reward_model.truncation={self.truncation}: removing the whole {side} does not shorten the "
                f"conversation to {self.max_length} tokens ({error})"
            )
        return pair(encoded, 0, truncated=True)

    def checked(self, conversation: Conversation) -> Conversation | Score:
        length = len(conversation.tokens)
        if length == 0:
            return Score.failed("the conversation has no tokens")
        if self.max_length is not None and length > self.max_length:
            return Score.failed(
                f"the conversation has {length} tokens, the reward model takes {self.max_length}; "
                "reward_model.truncation=left or right would shorten it"
            )
        return conversation


def messages_of(sample: Sample) -> Sequence[Any]:
    return sample.messages or ({"role": "user", "content": sample.prompt},)


def message_text(message: Message) -> str:
    return str(message["content"])


def pair(encoded: Any, row: int, *, truncated: bool = False) -> Conversation:
    segments = encoded.get("token_type_ids")
    return Conversation(tuple(encoded["input_ids"][row]), segments and tuple(segments[row]), truncated)


def length_limit(tokenizer: PreTrainedTokenizerBase, positions: object) -> int | None:
    """Tokens that the model takes: the least of its position embeddings and its tokenizer's limit; None: no limit."""
    limits = [positions, tokenizer.model_max_length]
    known = [limit for limit in limits if isinstance(limit, int) and 0 < limit < LARGEST_LIMIT]
    return min(known) if known else None
