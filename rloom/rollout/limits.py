"""How many sequences and cached tokens a rollout engine takes; `rloom plan` calls the same functions. No torch here."""

FREE_SHARE = 0.8  # of the free memory: activations and the sampler need some, too
PAGE_TOKENS = 128  # of a page of the key-value cache: the most that the attention kernel reads in one block


def with_queued(sequences: int) -> int:
    """Requests to send to an engine that runs so many sequences at a time, before it has finished some.

    As many wait as run: it stays full until more arrive, even if answers take a few tenths of a second.
    """
    return 2 * sequences


def pages_of(tokens: int, page_tokens: int = PAGE_TOKENS) -> int:
    return -(-tokens // page_tokens)


def wanted_cache_tokens(
    sequences: int, prompts: int, longest_prompt: int, longest_answer: int, page_tokens: int = PAGE_TOKENS
) -> int:
    """For all sequences at full length, in whole pages. Answers to one prompt share its pages."""
    answers = sequences * pages_of(longest_answer, page_tokens)
    return page_tokens * (answers + min(sequences, prompts) * pages_of(longest_prompt, page_tokens))


def cache_capacity(
    token_bytes: int, *, memory_share: float, total_bytes: float, free_bytes: float, page_tokens: int = PAGE_TOKENS
) -> int:
    """Tokens, in whole pages, that fit into the share of the GPU's memory and into what is free on it."""
    tokens = int(min(memory_share * total_bytes, FREE_SHARE * free_bytes) // token_bytes)
    return tokens // page_tokens * page_tokens
