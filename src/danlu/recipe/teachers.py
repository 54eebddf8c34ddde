"""The teachers of stages `distill` and `rl`: their roles, and how much each of them counts. No torch."""

from __future__ import annotations

from danlu.recipe.sections import Recipe, Teacher


def teachers_of(recipe: Recipe) -> dict[str, Teacher]:
    """The teachers of a recipe by role: teacher, teacher.1, ..."""
    return {
        "teacher" if not index else f"teacher.{index}": teacher for index, teacher in enumerate(recipe.teacher or ())
    }


def teacher_shares(recipe: Recipe) -> dict[str, float]:
    """How much each teacher counts, by role: the shares of all of them add up to 1."""
    teachers = teachers_of(recipe)
    weight = sum(teacher.weight for teacher in teachers.values())
    return {role: teacher.weight / weight for role, teacher in teachers.items()}
