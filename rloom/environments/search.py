"""Questions about a generated corpus, and a tool that searches it by BM25.

The corpus is a function of its seed and is invented: no model knows it, so an answer without a search is a guess. A
question needs one document, or two: the second is found by a name that the first one contains.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

DATA_SOURCE = "rloom/search"
PEOPLE, TRAIN_ROWS, TEST_ROWS, SEED = 600, 2048, 256, 0
RESULTS = 3
K1, B = 1.2, 0.75  # of BM25, the usual ones
INSTRUCTION = (
    "Use the tool `search`; the answer is in the documents it finds, not in what you know. Then give the answer, only "
    'its words, after "Answer:".'
)
WORD = re.compile(r"[a-z0-9]+")

SYLLABLES = ("ba", "do", "fi", "ga", "ke", "lo", "mi", "na", "po", "ru", "sa", "te", "vu", "zo", "ri", "la")
JOBS = ("baker", "pilot", "painter", "dentist", "farmer", "architect", "violinist", "chemist", "judge", "gardener")
COLOURS = ("red", "blue", "green", "white", "yellow", "grey")
ANIMALS = ("heron", "otter", "lynx", "badger", "raven", "salmon", "hare", "moose")


@dataclass(frozen=True)
class Person:
    name: str
    job: str
    town: str


@dataclass(frozen=True)
class Town:
    name: str
    colour: str
    animal: str
    founded: int


class Search:
    """The rule of the data source scores the last answer."""

    def __init__(self, results: int = RESULTS) -> None:
        self._results = results

    def search(self, query: str) -> str:
        """Search the documents by words and return the best ones.

        Args:
            query: Words that the document contains.
        """
        index = index_of(SEED)
        found = index.best(query, self._results)
        return "\n".join(index.documents[place] for place in found) or "no document has any of these words"


class Bm25:
    """score(q, d) = sum over the words of q of idf * tf * (K1 + 1) / (tf + K1 * (1 - B + B * len(d) / mean length))"""

    def __init__(self, documents: Sequence[str]) -> None:
        self.documents = documents
        self.counts = [Counter(words(document)) for document in documents]
        self.lengths = [count.total() for count in self.counts]
        self.mean_length = sum(self.lengths) / max(len(documents), 1)
        self.postings: dict[str, list[int]] = {}
        for place, count in enumerate(self.counts):
            for word in count:
                self.postings.setdefault(word, []).append(place)

    def best(self, query: str, count: int) -> list[int]:
        """Places of the best documents; equal scores in the order of the documents."""
        scores: Counter[int] = Counter()
        for word in dict.fromkeys(words(query)):
            for place in self.postings.get(word, ()):
                scores[place] += self.score(word, place)  # type: ignore[assignment]
        return sorted(scores, key=lambda place: (-scores[place], place))[:count]

    def score(self, word: str, place: int) -> float:
        having, tf = len(self.postings[word]), self.counts[place][word]
        idf = math.log(1 + (len(self.documents) - having + 0.5) / (having + 0.5))
        return idf * tf * (K1 + 1) / (tf + K1 * (1 - B + B * self.lengths[place] / self.mean_length))


def words(text: str) -> list[str]:
    return WORD.findall(text.casefold())


@cache
def index_of(seed: int) -> Bm25:
    people, towns = world(seed)
    documents = [f"{one.name} is a {one.job} and lives in the town of {one.town}." for one in people]
    documents += [
        f"{one.name} is a town that was founded in {one.founded}. Its flag is {one.colour}, and the animal on it is a "
        f"{one.animal}."
        for one in towns
    ]
    return Bm25(documents)


@cache
def world(seed: int) -> tuple[list[Person], list[Town]]:
    """Names occur once. Five people live in each town."""
    random = Random(seed)
    names = [first + second + third for first in SYLLABLES for second in SYLLABLES for third in SYLLABLES]
    drawn = iter(random.sample(names, PEOPLE + PEOPLE // 5))
    towns = [
        Town(
            next(drawn).capitalize() + "ville",
            random.choice(COLOURS),
            random.choice(ANIMALS),
            random.randint(900, 1899),
        )
        for _ in range(PEOPLE // 5)
    ]
    people = [Person(next(drawn).capitalize(), random.choice(JOBS), towns[index // 5].name) for index in range(PEOPLE)]
    return people, towns


def questions(person: Person, town: Town) -> list[tuple[str, str, int]]:
    """(question, answer, documents that are needed)"""
    return [
        (f"What is the job of {person.name}?", person.job, 1),
        (f"In which town does {person.name} live?", person.town, 1),
        (f"In which year was the town founded in which {person.name} lives?", str(town.founded), 2),
        (f"Which colour is the flag of the town in which {person.name} lives?", town.colour, 2),
        (f"Which animal is on the flag of the town in which {person.name} lives?", town.animal, 2),
    ]


def rows() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The people of the test questions are not in training questions."""
    random = Random(SEED)
    people, towns = world(SEED)
    by_name = {town.name: town for town in towns}
    asked = [[(person, one) for one in questions(person, by_name[person.town])] for person in people]
    held_out_people = math.ceil(TEST_ROWS / len(asked[0]))
    random.shuffle(asked)
    test = [one for of_person in asked[:held_out_people] for one in of_person]
    train = [one for of_person in asked[held_out_people:] for one in of_person]
    random.shuffle(test)
    random.shuffle(train)
    return (
        [row(*one, "train", index) for index, (_, one) in enumerate(train[:TRAIN_ROWS])],
        [row(*one, "test", index) for index, (_, one) in enumerate(test[:TEST_ROWS])],
    )


def row(question: str, answer: str, hops: int, split: str, index: int) -> dict[str, Any]:
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{question}\n\n{INSTRUCTION}"}],
        "ability": "search",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": index, "hops": hops},
    }
