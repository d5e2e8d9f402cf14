"""`train`: how does the loss fall? `cs336 train` records it, one cell for each stretch between two lines of its log."""

from cs336_systems.experiments.spec import Experiment
from cs336_systems.report.document import Chart, Point, Series
from cs336_systems.report.presentation import Cells
from cs336_systems.report.rows import titled
from cs336_systems.report.terms import LOSS
from cs336_systems.table import Column, Table, word
from cs336_systems.text import Text


def loss_curves(cells: Cells) -> dict[str, dict[int, float]]:
    """Run -> step -> loss, runs in the order of recording. A step that was trained again keeps its last loss."""
    runs: dict[str, dict[int, float]] = {}
    for cell in sorted((cell for cell in cells if cell.records), key=lambda cell: cell.environment.utc or ""):
        if "loss" in cell.metrics:
            name = str(cell.get("output") or "run").rstrip("/").rsplit("/", 1)[-1]
            losses = enumerate(cell.metrics["loss"].numbers, start=cell.get("first_step") or 1)
            runs.setdefault(name, {}).update(losses)
    return {name: dict(sorted(curve.items())) for name, curve in runs.items()}


def training_tables(cells: Cells) -> list[Table]:
    """The ends of each curve; the chart shows all of it."""
    heads = (Text("first loss", "最初损失"), Text("last loss", "最终损失"), Text("lowest", "最低损失"))
    columns = [word(Text("run", "运行")), Column(Text("steps", "步数")), *map(Column, heads)]
    rows = []
    for name, curve in loss_curves(cells).items():
        values = list(curve.values())
        rows.append([name, str(len(values)), *(f"{value:.4f}" for value in (values[0], values[-1], min(values)))])
    title = titled(cells[0].experiment, Text("losses", "损失"), [cells[0].machine])
    return [Table(title, columns, rows)] if rows else []


def training_charts(cells: Cells) -> list[Chart]:
    series = [
        Series(Text(name), [Point(step, value) for step, value in curve.items()])
        for name, curve in loss_curves(cells).items()
    ]
    return [Chart("", Text("Loss curves", "损失曲线"), "lines", Text("step", "步"), LOSS, series, log_y=True)]


TRAINING = Experiment(
    name="train",
    title=Text("Training", "训练"),
    question=Text("How does the loss fall?", "损失如何下降？"),
    tables=training_tables,
    charts=training_charts,
    runnable=False,
    complete_cells_only=False,
)
