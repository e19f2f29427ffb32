"""What is said of a choice: a table and a sentence."""

from dataclasses import replace

from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.planner.explain import sentence, table
from tests.planner.test_choose import GQA, of_one


def test_the_fastest_is_taken_and_the_table_is_sorted() -> None:
    choice = of_one(Shape(1, 65536, 32, 8, 128), 8)
    (found,) = choice.tables
    assert [row.seconds for row in found.rows] == sorted(row.seconds for row in found.rows)
    assert choice.best.seconds <= 1.002 * found.rows[0].seconds
    assert choice.best.rows[0].simulated
    text = table(choice)
    lines = [line.split("│") for line in text.splitlines() if line.startswith("│")]
    times = [cells[2].strip(" ~") for cells in lines if cells[2].strip()]  # others are folded
    assert times[0] == "ms"
    assert [float(time) for time in times[1:]] == sorted(map(float, times[1:]))
    assert text.count(" * ") == 2  # the chosen row, and what the star means
    assert sentence(choice).startswith(f"auto chose {choice.best.name} (")
    assert "\n" not in sentence(choice)


def test_words_for_what_is_as_good() -> None:
    """A simpler one is taken where it is as fast: nothing is a negative percentage slower."""
    choice = of_one(GQA, 4)
    first, other = choice.combinations[0], choice.combinations[-1]
    other = replace(other, seconds=first.seconds * 0.999)
    said = sentence(replace(choice, combinations=(first, other)))
    assert f"next best {other.name}, as fast;" in said
