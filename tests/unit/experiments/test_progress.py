"""Progress off a terminal: a line when a cell starts and one when it ends."""

from cs336_systems.experiments.progress import Progress


def test_lines_off_a_terminal(capsys):
    with Progress(2) as progress:
        for name in ("first", "second"):
            progress.begin(name)
            progress.end(name, "1.0 ms")
    assert capsys.readouterr().err.splitlines() == [
        "[1/2] first: started",
        "[1/2] first: 1.0 ms  (took 0 s, 0 s left)",
        "[2/2] second: started",
        "[2/2] second: 1.0 ms  (took 0 s, 0 s left)",
    ]


def test_a_quiet_run_prints_nothing(capsys):
    with Progress(1, quiet=True) as progress:
        progress.begin("only")
        progress.end("only", "done")
    assert capsys.readouterr().err == ""
