"""A command's output: bounded, with its beginning and its end."""

from wattune.workers.command.program_run import LONGEST_KEPT, Output


def test_all_of_a_short_output_is_kept():
    output = Output()
    for line in ("one", "", "three"):
        output.add(line)
    assert output.text == "one\n\nthree\n" and output.num_left_out == 0


def test_of_a_long_one_the_middle_is_left_out_and_counted():
    output = Output(head_bytes=20, tail_bytes=30)
    for number in range(1000):
        output.add(f"line {number}")
    lines = output.lines
    assert lines[:2] == ["line 0", "line 1"] and lines[-1] == "line 999"
    assert len(output.text) < 120
    assert len(lines) + output.num_left_out == 1000
    assert f"... {output.num_left_out} lines left out ..." in output.text


def test_a_line_without_end_is_cut():
    output = Output()
    output.add("x" * (LONGEST_KEPT + 5))
    assert len(output.lines[0]) == LONGEST_KEPT


def test_of_a_progress_bar_the_last_state_is_kept():
    output = Output()
    for line in ("one", "\r", " 1/9\r", " 2/9\r"):
        output.add(line)
    assert output.lines == ["one", " 2/9"]
    output.add(" 3/9")
    for line in ("of Windows\r", "", "", "two"):
        output.add(line)
    assert output.lines == ["one", " 3/9", "of Windows", "", "two"]
