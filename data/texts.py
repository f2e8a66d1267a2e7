"""Generated texts to read: the embedded model's problems for hotpotqa, tldr and govreport.

Two-hop questions over short paragraphs, posts with a one-line summary, and reports of which three
sentences matter. As in `stories`, most of a prompt is dispensable, but only the right part of it.
Each function returns (before, document, after, wanted answer, another answer): the other answer
knows as much, but is not what the reward asks for; `runs/pretrain.py` shows both.
"""

import random
from collections.abc import Callable

from data import stories
from data.files import Problem
from data.stories import IDLE, ITEMS, NAMES

Text = tuple[str, str, str, str, str]
PEOPLE, TOWNS = NAMES[:12], "Lund Bern Pisa Cork Oslo Riga Turin Ghent".split()
LANDS = "Norland Sudria Westmark Ostia Tavia Belmark".split()
WARES = "glass cheese silk paper salt wine steel honey".split()
FOLK = "uncle sister boss friend cousin neighbor brother teacher".split()
SIZES = "old new small big cheap red".split()
THINGS = "boat car phone lamp chair tent bike radio".split()
FAULTS = "leaks smells breaks rattles burns squeaks sinks rusts".split()
REPLIES = ("is not sorry|wants more money|does not answer|laughs at me|is very sad|blames me|"
           "tells everyone|offers help").split("|")
FILLER = ("I could not sleep.|The weather was bad.|I had a long week.|It was late.|We ate soup.|"
          "I made some tea.|The bus was full.|I like my garden.|My room is small.|I read a book."
          ).split("|")
BODIES = "road school water energy health harbor forest railway".split()
FAILINGS = "staff records money training tools plans rooms data".split()
NOTES = ("The program began ten years ago.|It has three main parts.|Congress asked for a report.|"
         "The law was changed once.|Many states take part.|The work is done each spring.|"
         "Officers met with experts.|The method is described below.|The budget is set each year.|"
         "Other groups gave comments.|The list of sites is long.|The rules are public.").split("|")

EMPTY = {*FILLER, *NOTES, *IDLE}  # sentences that are no facts


def world(r: random.Random, idle: int = 3) -> tuple[str, Callable[[], tuple[str, str, str]]]:
    """Paragraphs on two people and two towns, each with some idle sentences, and a function that
    asks about them: question, reasoning, answer."""
    people, towns = r.sample(PEOPLE, 2), r.sample(TOWNS, 2)
    met = dict(zip(people, [*people[1:], people[0]], strict=True))
    left, sells, joined = ({x: r.choice(y) for x in keys} for keys, y in
                           ((people, towns), (people, THINGS), (towns, LANDS)))
    makes = dict(zip(towns, r.sample(WARES, 2), strict=True))
    paragraphs = [[f"{x} left {left[x]}.", f"{x} sells {sells[x]}s.", f"{x} met {met[x]}."]
                  for x in people]
    paragraphs += [[f"{x} joined {joined[x]}.", f"{x} makes {makes[x]}."] for x in towns]
    for facts in paragraphs:
        for sentence in r.sample([*FILLER, *IDLE], idle):
            facts.insert(r.randint(0, len(facts)), sentence)
    r.shuffle(paragraphs)

    def ask() -> tuple[str, str, str]:
        a, b = r.sample(people, 2)
        town, c = left[a], met[a]
        return r.choice((
            (f"From which land is {a}?", f"{a} left {town}. {town} joined {joined[town]}.",
             joined[town]),
            (f"What is made in the home town of {a}?",
             f"{a} left {town}. {town} makes {makes[town]}.", makes[town]),
            (f"What are the wares of the friend of {a}?", f"{a} met {c}. {c} sells {sells[c]}s.",
             f"{sells[c]}s"),
            (f"Are {a} and {b} from the same town?", f"{a} left {town}. {b} left {left[b]}.",
             "yes" if town == left[b] else "no")))
    return "\n".join("- " + " ".join(facts) for facts in paragraphs), ask


def replies(work: str, answer: str) -> tuple[str, str]:
    return (f"Facts: {work} Answer: {answer}",
            f"Facts: {work} So the reply to this is {answer} and nothing else.")


def hotpotqa(r: random.Random) -> Text:
    """A question that needs two of four paragraphs."""
    paragraphs, ask = world(r)
    question, work, answer = ask()
    return ("Read the paragraphs and answer the question. End with Answer: and a few words.\n\n",
            paragraphs, f"\n\nQuestion: {question}", *replies(work, answer))


def scatter(r: random.Random, facts: list[str], filler: list[str]) -> str:
    """The facts in order, with filler before, between and after them."""
    places = sorted(r.randint(0, len(filler)) for _ in facts)
    for offset, (place, fact) in enumerate(zip(places, facts, strict=True)):
        filler.insert(place + offset, fact)
    return " ".join(filler)


def tldr(r: random.Random, idle: int = 15) -> Text:
    """A post of which three sentences matter, and its summary in one line; `idle` = at most as many
    of the others."""
    who, size, thing, fault, reply = map(r.choice, (FOLK, SIZES, THINGS, FAULTS, REPLIES))
    verb = r.choice(("bought", "borrowed", "sold", "lost"))
    link = {"bought": "from", "borrowed": "from", "sold": "to", "lost": "of"}[verb]
    facts = [f"I {verb} a {size} {thing} {link} my {who}.", f"Now the {thing} {fault}.",
             f"My {who} {reply}."]
    other = r.choice([x for x in FOLK if x != who])
    filler = r.sample([*FILLER, *IDLE], r.randint(idle - 5, idle)) + [
        f"My {other} has a {r.choice(THINGS)}.", f"My {other} {r.choice(REPLIES)}."]
    r.shuffle(filler)
    short = f"{verb} a {size} {thing} {link} my {who}, it {fault}, my {who} {reply}."
    return ("Sum up the post in one line.\n\nPOST: ", scatter(r, facts, filler), "\n\nTL;DR:",
            short, f"{filler[0]} {short} {filler[1]} {r.choice(FILLER)} {r.choice(IDLE)}")


def govreport(r: random.Random, idle: int = 29) -> Text:
    """A report of which three sentences matter; the summary is these; `idle` = of the others."""
    body, lack, item = r.choice(BODIES), r.choice(FAILINGS), r.choice(ITEMS)
    other = r.choice([x for x in FAILINGS if x != lack])
    facts = [f"The office found that the {body} program lacks {lack}.",
             f"Costs of {item} rose by {r.randint(2, 60)} percent in {r.randint(2, 9)} years.",
             f"The office advises to spend more on {lack} and less on {other}."]
    items, bodies = ([x for x in of if x != about] for of, about in ((ITEMS, item), (BODIES, body)))
    filler = [*NOTES, *IDLE, *(f"Costs of {x} did not change." for x in r.sample(items, 4)),
              *(f"The {x} program has {r.choice(FAILINGS)}." for x in r.sample(bodies, 5))]
    filler = r.sample(filler, idle)
    lead = " ".join(filler[:3])
    return ("Write a summary of the report.\n\n", scatter(r, facts, filler), "\n\nSummary:",
            " ".join(facts), " ".join([lead, *facts]))


def load(task: str, split: str) -> list[Problem]:
    """The problems of a reading task, always the same: 4,096 to train on, 1,024 to test."""
    return [problem(task, split, i) for i in range(stories.SIZES[split])]


def problem(task: str, split: str, index: int) -> Problem:
    read = {"hotpotqa": hotpotqa, "tldr": tldr, "govreport": govreport}[task]
    before, document, after, answer, _ = read(random.Random(f"{task} {split} {index}"))
    return Problem(index, before, answer.rpartition("Answer: ")[2], document, after)
