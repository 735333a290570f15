"""The outputs of agents that ask with tokens, compared with what was sampled for them.

An output is the tokens of one branch, of which those with mask 1 are to be trained. Each of them must have been sampled
after the same tokens: an agent that decodes an answer and encodes it again may have others. Log-probs and versions are
those of the record.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from itertools import pairwise

from rloom.episodes.episode import Episode, Node
from rloom.episodes.replies import EnvironmentFailed

Decode = Callable[[Sequence[int]], str]
Span = tuple[int, int, int]


def episode_of(recorded: Episode, outputs: Sequence[tuple[list[int], list[int]]], decode: Decode) -> Episode:
    """The outputs, (tokens, mask) each, as the branches of an episode. What they share is shared; answers that are in
    none of them are left out. Of answers with the same tokens, each output gets one that no other has. A sampled token
    with mask 1 in several outputs is trained once. EnvironmentFailed: a token with mask 1 was not sampled."""
    if not outputs:
        raise EnvironmentFailed("the agent returned no output")
    built = Episode()
    paths = {index: recorded.tokens(index) for index in range(len(recorded.nodes))}
    used: set[int] = set()  # last nodes of outputs
    found: list[tuple[list[Span], list[int]]] = []  # what each output has of the record, and its mask
    cuts: dict[int, set[int]] = {index: set() for index in paths}  # node -> where pieces of any output begin and end
    for tokens, mask in outputs:
        if len(mask) != len(tokens):
            raise EnvironmentFailed(f"the agent returned {len(tokens)} tokens with {len(mask)} entries of their mask")
        leaf, stop = sampled_leaf(recorded, paths, used, tokens, mask)
        used.add(leaf)
        found.append((spans(recorded, leaf, stop), mask))
        for index, start, end in found[-1][0]:
            ends = pieces(mask, start, end, recorded.nodes[index].sampled)
            cuts[index] |= {place for first, last, _ in ends for place in (first, last)}
    known: dict[tuple[int | None, int, int, int, bool], int] = {}
    trained_pieces: set[tuple[int, int]] = set()  # (node, place in its path)
    for spans_S, mask in found:
        parent: int | None = None
        for index, start, end in spans_S:
            node = recorded.nodes[index]
            for first, last, is_masked in pieces(mask, start, end, node.sampled, cuts[index]):
                is_again = (parent, index, first, last, True) not in known and (index, first) in trained_pieces
                trained = is_masked and not is_again
                key = (parent, index, first, last, trained)
                if key not in known:
                    known[key] = built.add(piece(node, parent, first - start, last - start, last, trained, decode))
                if trained:
                    trained_pieces.add((index, first))
                parent = known[key]
    return built


def spans(recorded: Episode, leaf: int, stop: int) -> list[Span]:
    """(node, its first place, its end) on the path to a node, up to this length of the path."""
    found, start = list[Span](), 0
    for index in recorded.path(leaf):
        end = start + len(recorded.nodes[index].tokens_L)
        if start < stop or not found:
            found.append((index, start, min(end, stop)))
        start = end
    return found


def sampled_leaf(
    recorded: Episode, paths: Mapping[int, list[int]], used: Set[int], tokens: Sequence[int], mask: Sequence[int]
) -> tuple[int, int]:
    """The node whose path the output is, and how many tokens it has up to the last one with mask 1.

    `paths`: the tokens of each. `used`: taken only if there is no other.
    """
    stop = max((place + 1 for place, one in enumerate(mask) if one), default=len(tokens))
    if not paths:
        raise EnvironmentFailed("the agent returned tokens and had asked for no answer")
    leaf = max(
        paths,
        # what follows an answer begins with it, too, and is not another one with its tokens
        key=lambda index: (common(paths[index], tokens[:stop]), len(paths[index]) == stop, index not in used),
    )
    equal = common(paths[leaf], tokens[:stop])
    sampled = [node.sampled for index in recorded.path(leaf) for node in [recorded.nodes[index]] for _ in node.tokens_L]
    wrong = (place for place in range(len(tokens)) if mask[place] and (place >= equal or not sampled[place]))
    if (place := next(wrong, None)) is not None:
        raise EnvironmentFailed(
            f"token {place} of the agent's output has mask 1 and was not sampled after the tokens before it; return "
            "the tokens of the answers as they were given, not encoded again"
        )
    return leaf, min(stop, equal)


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens are equal from the beginning on."""
    length = min(len(first), len(second))
    return next((place for place in range(length) if first[place] != second[place]), length)


def pieces(
    mask: Sequence[int], start: int, end: int, sampled: bool, cuts: Set[int] = frozenset()
) -> list[tuple[int, int, bool]]:
    """Parts of a node from `start` to `end` that are trained, and others. None goes on over one of the cuts."""
    if not sampled:
        return [(start, end, False)]
    changes = {place for place in range(start + 1, end) if bool(mask[place]) != bool(mask[place - 1])}
    inner = sorted(place for place in changes | cuts if start < place < end)
    return [(first, last, bool(mask[first])) for first, last in pairwise([start, *inner, end]) if first < last]


def piece(node: Node, parent: int | None, first: int, last: int, length: int, trained: bool, decode: Decode) -> Node:
    """Tokens `first` to `last` of a node. `length`: of the path up to there."""
    whole = last == len(node.tokens_L)
    if first == 0 and whole and trained == node.sampled:
        return replace(node, parent=parent)
    tokens_L = node.tokens_L[first:last]
    text = decode(tokens_L.tolist())
    return replace(
        node,
        parent=parent,
        messages=({"role": "assistant" if node.sampled else "user", "content": text},),
        tokens_L=tokens_L,
        sampled=trained,
        logprobs_L=node.logprobs_L[first:last] if trained and node.logprobs_L is not None else None,
        finished=node.finished and whole,
        stop=node.stop if whole else "",
        experts_PMK=node.experts_PMK[:length] if trained and node.experts_PMK is not None else None,
    )
