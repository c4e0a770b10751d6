#!/usr/bin/env python3
"""Write the demonstration's data set: pairs of sentences, paraphrase or not, in the TSV layout of the MRPC corpus.

Everything is made from the templates and word lists below by a seeded generator; nothing is copied from anywhere. A negative pair is
always a hard one: the same words with the roles swapped, or a number, place, day, thing or name changed (one of them or two). Both
kinds of pairs go through the same rewordings, so the length does not give the label away.

    python scripts/make_demo_data.py [TARGET]       # default: data/demo
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

HEADER = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"
TRAIN_ROWS, DEV_ROWS, SEED = 600, 200, 2024
DEFAULT_TARGET = Path(__file__).resolve().parent.parent / "data" / "demo"

PLACES = ("Lisbon", "Oslo", "Nairobi", "Lima", "Kyoto", "Dublin", "Toronto", "Cairo", "Vienna", "Helsinki", "Quito", "Seoul")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
NUMBERS = ("two", "three", "five", "seven", "nine", "twelve", "fifteen", "twenty", "thirty", "forty", "sixty", "ninety")
PEOPLE = ("the baker", "the pilot", "the teacher", "the nurse", "the farmer", "the painter", "the judge", "the sailor", "the engineer", "the singer")
FIRMS = ("Orbis Foods", "Halden Steel", "Vantor Air", "Merin Bank", "Quill Press", "Tarn Motors", "Lyra Media", "Corvo Shipping")
THINGS = ("apples", "bicycles", "lamps", "carpets", "radios", "chairs", "melons", "kettles", "violins", "tractors")


@dataclass(frozen=True)
class Facts:
    """What a sentence says; a paraphrase says the same facts with another template."""

    who: str
    whom: str
    firm: str
    rival: str
    thing: str
    number: str
    place: str
    day: str


# One topic = (the facts it states, the ways of stating them). `{who}` and `{whom}`, `{firm}` and `{rival}` can be swapped.
TOPICS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (
        ("who", "whom", "thing"),
        (
            "{who} sold {thing} to {whom}.",
            "{whom} bought {thing} from {who}.",
            "It was {who} who sold {whom} the {thing}.",
            "The {thing} of {who} were bought by {whom}.",
        ),
    ),
    (
        ("firm", "rival", "day"),
        (
            "{firm} will take over {rival} on {day}.",
            "{rival} will be bought by {firm} on {day}.",
            "On {day} {firm} is to acquire {rival}.",
            "The sale of {rival} to {firm} is planned for {day}.",
        ),
    ),
    (
        ("firm", "number", "place"),
        (
            "{firm} will open {number} new shops in {place}.",
            "{number} new {firm} shops will open in {place}.",
            "{place} will get {number} more shops of {firm}.",
            "In {place}, {firm} plans {number} additional stores.",
        ),
    ),
    (
        ("who", "place", "day"),
        (
            "{who} moved to {place} on {day}.",
            "On {day} {who} went to live in {place}.",
            "{place} has been the home of {who} since {day}.",
            "Since {day}, {who} has lived in {place}.",
        ),
    ),
    (
        ("number", "thing", "place"),
        (
            "A fire in {place} destroyed {number} {thing}.",
            "{number} {thing} were lost in a fire in {place}.",
            "In {place}, {number} {thing} burned.",
            "{place}: fire ruins {number} {thing}.",
        ),
    ),
    (
        ("thing", "number", "day"),
        (
            "{number} {thing} will arrive on {day}.",
            "On {day} we expect {number} {thing}.",
            "A delivery of {number} {thing} is due on {day}.",
            "{day} is when the {number} {thing} will come.",
        ),
    ),
)
LEADS = (*[""] * 9, "Reportedly, ", "As expected, ", "It seems that ")

POOLS = {"who": PEOPLE, "whom": PEOPLE, "firm": FIRMS, "rival": FIRMS, "thing": THINGS, "number": NUMBERS, "place": PLACES, "day": DAYS}
SWAPS = {"who": "whom", "firm": "rival"}
SWAP_SHARE = 0.3  # of the negatives that have two roles to swap


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", type=Path, default=DEFAULT_TARGET, help="folder to write (default: %(default)s)")
    target: Path = parser.parse_args().target
    target.mkdir(parents=True, exist_ok=True)
    rows = make_rows(TRAIN_ROWS + DEV_ROWS, random.Random(SEED))
    for name, part in (("train", rows[:TRAIN_ROWS]), ("dev", rows[TRAIN_ROWS:])):
        path = target / f"{name}.tsv"
        path.write_text("\n".join([HEADER, *part]) + "\n", encoding="utf-8")
        print(f"{path}: {len(part)} rows, {sum(row.startswith('1') for row in part)} paraphrases")


def make_rows(count: int, rng: random.Random) -> list[str]:
    """``count`` different rows, half of each label, in random order."""
    pairs: dict[tuple[str, str], int] = {}
    labels = [index % 2 for index in range(count)]
    rng.shuffle(labels)
    for label in labels:
        pair = make_pair(label, rng)
        while pair in pairs:
            pair = make_pair(label, rng)
        pairs[pair] = label
    return [f"{label}\t{2 * index + 1}\t{2 * index + 2}\t{first}\t{second}" for index, ((first, second), label) in enumerate(pairs.items())]


def make_pair(label: int, rng: random.Random) -> tuple[str, str]:
    slots, templates = rng.choice(TOPICS)
    facts = draw_facts(rng)
    other = facts if label else change(facts, slots, rng)
    # Now and then the same template twice: a negative then differs in a word or two alone, a positive at most in the lead.
    first, second = rng.sample(templates, 2) if rng.random() < 0.8 else [rng.choice(templates)] * 2
    return state(first, facts, rng), state(second, other, rng)


def draw_facts(rng: random.Random) -> Facts:
    who, whom = rng.sample(PEOPLE, 2)
    firm, rival = rng.sample(FIRMS, 2)
    draw: Callable[[tuple[str, ...]], str] = rng.choice
    return Facts(who, whom, firm, rival, draw(THINGS), draw(NUMBERS), draw(PLACES), draw(DAYS))


def change(facts: Facts, slots: tuple[str, ...], rng: random.Random) -> Facts:
    """Other facts than these: two roles swapped, or one or two words of the same kind put in."""
    role = next((slot for slot in slots if SWAPS.get(slot) in slots), None)
    if role and rng.random() < SWAP_SHARE:
        return replace(facts, **{role: getattr(facts, SWAPS[role]), SWAPS[role]: getattr(facts, role)})
    taken = set(vars(facts).values())
    changes = {slot: rng.choice([word for word in POOLS[slot] if word not in taken]) for slot in rng.sample(slots, rng.choice((1, 2)))}
    return replace(facts, **changes)


def state(template: str, facts: Facts, rng: random.Random) -> str:
    lead = rng.choice(LEADS)
    sentence = template.format(**vars(facts))
    if lead and sentence.startswith(("On ", "In ", "It ", "A ", "The ", "With ", "Since ")):
        sentence = sentence[0].lower() + sentence[1:]
    text = lead + sentence
    return text[0].upper() + text[1:]


if __name__ == "__main__":
    main()
