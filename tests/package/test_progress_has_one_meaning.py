"""progress= is False for nothing, True for a bar on standard error, or a function of the work done and the total."""

from gradlogz._progress import reporter


def test_false_shows_nothing(capsys):
    reporter(False, "steps")(1, 2)
    assert capsys.readouterr() == ("", "")


def test_true_shows_a_bar_on_standard_error(capsys):
    show = reporter(True, "steps")
    show(1, 2)
    half = capsys.readouterr()
    show(2, 2)
    full = capsys.readouterr()
    assert half.out == full.out == ""
    assert half.err.count("█") == half.err.count("·") == 20
    assert "1/2 steps" in half.err
    assert full.err.count("█") == 40
    assert full.err.endswith("\n")


def test_where_the_total_is_not_known_the_bar_is_a_count(capsys):
    reporter(True, "tokens")(1000, 0)
    shown = capsys.readouterr().err
    assert "1,000 tokens" in shown
    assert "█" not in shown
    assert not shown.endswith("\n")


def test_a_function_is_called_as_it_is():
    calls = []
    reporter(lambda done, total: calls.append((done, total)), "steps")(3, 7)
    assert calls == [(3, 7)]
