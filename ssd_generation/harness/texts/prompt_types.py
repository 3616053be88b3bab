"""Prompts: messages of the user, in one or several turns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Prompt", "Question", "questions_of"]


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        id: name of the prompt, unique in a run.
        category: kind of task; medians are taken per category.
        text: the user's message.
        later: the user's messages after each answer, where there is a chat template.
    """

    id: str
    category: str
    text: str
    later: tuple[str, ...] = ()


@dataclass(frozen=True)
class Question:
    """One turn of a prompt.

    Attributes:
        id: name of the question, unique in a run.
        category: category of the prompt.
        text: the user's message in this turn.
        conversation: name of the prompt.
        earlier: the turns before it, each as name and text.
    """

    id: str
    category: str
    text: str
    conversation: str
    earlier: tuple[tuple[str, str], ...] = ()


def questions_of(prompts: Iterable[Prompt], has_turns: bool) -> list[Question]:
    """Return the turns of all prompts, each conversation without interruption.

    Args:
        prompts: prompts in the order in which they are asked.
        has_turns: whether to ask later turns as well, which needs a chat template.
    """
    questions = []
    for prompt in prompts:
        earlier: list[tuple[str, str]] = []
        for number, text in enumerate((prompt.text, *(prompt.later if has_turns else ())), start=1):
            name = prompt.id if number == 1 else f"{prompt.id}, turn {number}"
            questions.append(Question(name, prompt.category, text, prompt.id, tuple(earlier)))
            earlier.append((name, text))
    return questions
