"""How self-written prompts begin: a few words of each kind of request; the target writes the rest itself.

A seed is a sequence of parts. Of each part the text is given and the target goes on from there, for at least `least`
tokens and at most `most`; 0 of both: nothing is written after it. A space at the end of a text is left out, as in most
vocabularies it belongs to the word that follows. The kinds are those that people ask a chat model for;
none of the words comes from a benchmark.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """Given text and how many tokens the target adds to it."""

    text: str
    least: int = 4
    most: int = 80


@dataclass(frozen=True, slots=True)
class Seed:
    """The parts of one user turn."""

    parts: tuple[Part, ...]


def _short(*texts: str) -> tuple[Seed, ...]:
    return tuple(Seed((Part(text),)) for text in texts)


def _document(instruction: str, opening: str = "", least: int = 90, most: int = 260) -> Seed:
    return Seed((Part(f"{instruction}\n\n{opening}", least, most),))


def _passage(before: str, question: str, least: int = 90, most: int = 240) -> Seed:
    return Seed((Part(before, least, most), Part(question, 5, 40)))


_FREE = (Seed((Part("", 3, 120),)),)

_ASK = _short(
    "What is ", "What are ", "What was the ", "Who was ", "Who invented ", "When did ", "Where is ", "Why do ",
    "Why is ", "How does ", "How do I ", "How can I ", "How many ", "Which ", "Is it true that ", "Can you explain ",
    "Explain ", "Explain the difference between ", "Tell me about ", "Describe ", "Define ", "What happens when ",
    "What are the main causes of ", "What are the advantages and disadvantages of ", "Give me an overview of ",
    "How did ", "In which year ", "What is the capital of ", "What is the best way to ", "Compare ",
)  # fmt: skip

_WRITE = _short(
    "Write a short story about ", "Write a poem about ", "Write an email to ", "Write a letter to ",
    "Write a blog post about ",
    "Write a speech about ", "Write a dialogue between ", "Write a product description for ", "Write a review of ",
    "Write an essay on ", "Draft a ", "Compose a ", "Create a plan for ", "Come up with five ideas for ",
    "Give me a list of ", "List ten ", "Suggest a ", "Help me write ", "Invent a ", "Write a recipe for ",
    "Imagine you are ", "Pretend to be ", "You are a ", "Act as a ", "I want you to act as ", "Take the role of ",
    "Write a headline for ", "Write an introduction for ", "Plan a trip to ",
)  # fmt: skip

_MATHS = _short(
    "Solve for x: ", "Calculate ", "What is the sum of ", "A train ", "A farmer has ", "Tom has ", "Anna buys ",
    "A shop sells ", "If a ", "If 3 ", "Find the area of ", "Find the value of ", "How many ways ", "There are ",
    "The price of ", "A rectangle has ", "Maria earns ", "In a class of ", "Simplify ", "What is the probability that ",
    "Each day, ", "John ", "A box contains ", "Sam and Lily ", "After ", "Last week, ",
)  # fmt: skip

_REASON = _short(
    "Three friends ", "If all ", "Suppose that ", "Which of the following ", "Put these in order: ",
    "What comes next: ", "Find the odd one out: ",
    "Is the following argument valid? ", "You have two ", "There are three boxes",
)  # fmt: skip

_CODE = _short(
    "Write a Python function that ", "Write a Python program to ", "Write a JavaScript function ",
    "Write a SQL query to ",
    "Write a C++ program ", "Write a class in Python for ", "How do I use ", "What does this code do?\n\n",
    "Fix the bug in this code:\n\n", "Explain this function:\n\ndef ", "Write a shell script that ",
    "Implement ", "Complete the function:\n\ndef ", "Write unit tests for ", "Write an HTML page ",
    "Write a regular expression that ",
)  # fmt: skip

_SCIENCE = _short(
    "Explain how photosynthesis ", "Explain Newton's ", "What is the role of ", "Describe the structure of ",
    "How do vaccines ", "What is quantum ", "Explain the theory of ", "What were the consequences of ",
    "Discuss the influence of ", "What is the meaning of ", "How did the Industrial Revolution ", "Analyse ",
)  # fmt: skip

_SUMMARISE = (
    _document("Summarize the following text:"),
    _document("Summarize this article in a few sentences:"),
    _document("Give a short summary of the text below."),
    _document("Summarize:"),
    _document("What are the key points of this passage?"),
    _document("TL;DR of the following:"),
    _document("Write a one-paragraph summary of this news report:"),
    _document("Please summarise the email below.", "Dear "),
    Seed((Part("", 100, 260), Part("\n\nSummarize the text above.", 0, 0))),
    Seed((Part("Article: ", 100, 260), Part("\n\nSummary:", 0, 0))),
)

_REWRITE = (
    _document("Rewrite the following text in a friendlier tone:", least=40, most=150),
    _document("Correct the grammar of this text:", least=30, most=120),
    _document("Make this text shorter:", least=60, most=180),
    _document("Rephrase this paragraph:", least=40, most=140),
    _document("Edit the following paragraph for clarity:", least=40, most=140),
    _document("Repeat the following text word for word:", least=20, most=120),
    _document("Turn the following notes into a paragraph:", "- ", least=30, most=120),
    _document("Add comments to this code:", "def ", least=30, most=140),
    _document("Continue the following text:", least=30, most=120),
)

_EXTRACT = (
    _document("Extract all names and dates from the text below.", least=60, most=200),
    _document("List the people, places and organisations in this text:", least=60, most=200),
    _document("Extract the key facts of this passage as a list:", least=60, most=200),
    _document("Convert this text to JSON:", least=40, most=150),
    _document("Put the following data into a table:", least=40, most=150),
    _document("Find the numbers in this text:", least=50, most=150),
    _document("Which words in this text are verbs?", least=30, most=100),
    _document("Classify each of these reviews as positive or negative:", "1. ", least=50, most=160),
    _document("What is the sentiment of this text?", least=40, most=140),
    _document("Give a title to the following text:", least=60, most=200),
)

_PASSAGES = (
    _passage("Read this passage:\n\n", "\n\nQuestion: "),
    _passage("Context: ", "\n\nQuestion: "),
    _passage("Use the text below to answer the question.\n\n", "\n\nWhat "),
    _passage("Answer the question from the document.\n\nDocument: ", "\n\nQuestion: Who "),
    _passage("Passage 1: ", "\n\nAccording to the passage, "),
    _passage("", "\n\nBased on the text above, "),
    _passage("Here is some background.\n\n", "\n\nHow "),
    Seed((Part("Document 1: ", 50, 130), Part("\n\nDocument 2: ", 50, 130), Part("\n\nQuestion: ", 5, 40))),
    Seed((Part("[1] ", 50, 120), Part("\n[2] ", 50, 120), Part("\n[3] ", 40, 100), Part("\n\nQuestion: ", 5, 40))),
)

_LANGUAGES = ("English", "German", "French", "Spanish", "Italian", "Portuguese", "Dutch")
_OPENINGS = {
    "English": ("The ", "In ", "I ", "She ", "After ", "We "),
    "German": ("Die ", "Der ", "Das ", "In ", "Ich ", "Nach ", "Es ", "Wir ", "Am ", "Ein "),
    "French": ("Le ", "La ", "Les ", "Dans ", "Il ", "Nous "),
    "Spanish": ("El ", "La ", "Los ", "En ", "Es ", "Por "),
    "Italian": ("Il ", "La ", "Nel ", "Per "),
    "Portuguese": ("O ", "A ", "Os ", "Em "),
    "Dutch": ("De ", "Het ", "In ", "Een "),
}
_TRANSLATE = tuple(
    Seed((Part(form.format(source=source, target=target) + opening, 10, 70),))
    for form in (
        "Translate {source} to {target}: ",
        "Translate this {source} text into {target}:\n\n",
        "Translate from {source} to {target}:\n",
    )
    for source in _LANGUAGES
    for target in (("English",) if source != "English" else ("German", "French", "Spanish"))
    for opening in _OPENINGS[source]
)

FIRST: tuple[tuple[float, tuple[Seed, ...]], ...] = (
    (0.15, _FREE),
    (0.13, _ASK),
    (0.12, _WRITE),
    (0.10, _MATHS),
    (0.03, _REASON),
    (0.07, _CODE),
    (0.05, _SCIENCE),
    (0.10, _SUMMARISE),
    (0.04, _REWRITE),
    (0.05, _EXTRACT),
    (0.09, _PASSAGES),
    (0.07, _TRANSLATE),
)
"""(share, seeds) of each kind for the first turn of a dialogue."""

FOLLOW_UP: tuple[Seed, ...] = (
    Seed((Part("", 3, 60),)),
    Seed((Part("", 3, 60),)),
    *_short(
        "Can you ", "Why ", "How ", "What about ", "Now ", "Make it ", "Give me another ", "Explain the ",
        "Rewrite it ", "Thanks! ", "And what ", "Write ", "Could you ", "Please ",
        "I don't understand ", "Tell me more about ",
    ),
    Seed((Part("Summarize your answer.", 0, 0),)),
    Seed((Part("Summarize that in one sentence.", 0, 0),)),
    Seed((Part("Make it shorter.", 0, 0),)),
    Seed((Part("Translate your answer into German.", 0, 0),)),
    Seed((Part("Say it again in other words.", 0, 0),)),
    Seed((Part("List the main points.", 0, 0),)),
)  # fmt: skip
"""Seeds of the turns after the first."""
