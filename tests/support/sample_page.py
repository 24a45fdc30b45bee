"""A page with one of every part, and text that would be harmful if it were interpreted as markup."""

import math

from gradlogz.page import (
    Axis,
    Chip,
    Column,
    Facts,
    Figure,
    Heat,
    Line,
    Outlines,
    Page,
    PointCloud,
    Points,
    Reference,
    Ribbon,
    Section,
    Table,
    Text,
    VerdictBanner,
)

HARM = "</script><script>window.harmed = true</script><img src=x onerror='window.harmed = true'>&amp;"

TIMES = list(range(0, 50, 5))


def turning(count: int, dim: int) -> list[list[list[float]]]:
    """Return tokens on circles in `dim` coordinates that shrink with time."""
    return [[[math.cos(i + 0.7 * c) / (1 + t) for c in range(dim)] for i in range(count)] for t in range(len(TIMES))]


def sample(harm: str = HARM) -> Page:
    """Return the page, with that text at every place that shows a user's text."""
    step = Axis(f"time {harm}", "steps", "t")
    size = Axis("size", "1", "exp H(λ)", scale="log")
    line = Line(f"seen {harm}", TIMES, [math.exp(-t / 20) for t in TIMES])
    band = Ribbon("seeds", TIMES, [math.exp(-t / 18) / 2 for t in TIMES], [math.exp(-t / 22) * 2 for t in TIMES])
    marked = Points("fell", [10, 20], [0.6, 0.4], colour="vermilion", symbol="x", text=[harm, "fell"])
    theory = Line("theory", TIMES, [math.exp(-t / 19) for t in TIMES], colour="ink", dash="dash")
    kinds = (("gaussian", "blue"), ("clusters", "vermilion"))
    says = [[f"{harm}\nline {i}{j}" for j in range(3)] for i in range(2)]
    grid = Heat("verdict", [0.1, 0.2, 0.3], [1, 2], [[0, 1, 1], [0, 0, None]], says, kinds)
    counts = Heat("clusters", [0.1, 0.2, 0.3], [1, 2], [[0, 1, 4], [2, 0, 3]], says)
    turns = [2 * math.pi * i / 24 for i in range(24)]
    ellipses = [([3 * i + 2 * math.cos(a) for a in turns], [i + math.sin(a) for a in turns]) for i in range(3)]
    track = (Line("track", [0, 3, 6], [0, 1, 2]), Outlines(f"covariance {harm}", ellipses, "orange"))
    columns = (Column("name"), Column("size", "1", "exp H(λ)"), Column("verdict"))
    rows = (
        (f"b {harm}", 10.0, Chip("agrees", "agrees")),
        ('quoted, "name"', 9.0, Chip("departs", "departs")),
        ("c", None, Chip(harm, "silent")),
    )
    plane = (Axis("x1", "1"), Axis("x2", "1"))
    space = (*plane, Axis("x3", "1"))
    groups = [i % 9 for i in range(40)]
    return Page(
        name=f"sample {harm}",
        title=f"A page of every part {harm}",
        subtitle=f"Parts and marks {harm}",
        verdict=VerdictBanner(
            f"It ends in two clusters {harm}.",
            (Chip("clusters", colour="vermilion"), Chip("agrees with theory", "agrees")),
            (f"A note {harm}",),
        ),
        sections=(
            Section("Clouds", (
                PointCloud(f"plane {harm}", f"Plane {harm}", plane, TIMES, turning(40, 2), groups, f"Caption {harm}"),
                PointCloud("space", "Space", space, TIMES, turning(40, 3), groups),
            )),
            Section("Curves", (
                Text((f"Some words {harm}.", "And more.")),
                Figure("curves", f"Curves {harm}", step, size, (band, line, theory, marked), f"Caption {harm}"),
                Figure("grid", "Grid", Axis("beta", "1", "β"), Axis("law", "kind", names=("a", harm, "c")), (grid,)),
                Figure("counts", "Counts", Axis("beta", "1", "β"), Axis("tau", "1", "τ"), (counts,)),
                Figure("tracks", "Tracks", Axis("x", "m"), Axis("y", "m"), track, equal=True),
            )),
            Section("Folded", (
                Facts({f"name {harm}": harm}),
                Table("seeds", f"Seeds {harm}", columns, rows, f"Caption {harm}"),
                VerdictBanner("A verdict inside."),
                Figure("late", "Late", step, size, (line,)),
            ), folded=True),
        ),
        methods=(f"How it was done {harm}.",),
        reproduce={"version": "0", "seed": "0", "command": f"gradlogz simulate {harm}"},
        references=(Reference("shim22", f"A Probabilistic Interpretation {harm}", "arXiv 2205.01080"),),
        data={"harm": harm, "nothing": float("nan"), "numbers": [1.0, 2.5]},
    )  # fmt: skip
