"""One self-contained page about a training run: what it learned, how the update behaved, what it cost.

The page fetches nothing and runs no script, so it can be mailed, archived and read on a phone. Everything that comes
from the run is escaped.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path

from longstraw.report.charts import (
    Figure,
    StageUse,
    learning_figures,
    response_figures,
    stage_uses,
    time_figure,
    update_figures,
)
from longstraw.report.formats import bytes_text, count_text, escape, number_text, score_text, seconds_text
from longstraw.report.run_folder import Completion, RunFolder, StepTable, read_run_folder

NUM_SAMPLES = 4  # responses shown of the first and of the last step
NUM_PROMPT_CHARACTERS = 400
NUM_RESPONSE_CHARACTERS = 2_000
NUM_TABLE_STEPS = 100


def write_report(run_folder: Path) -> Path:
    """Write `report.html` into a run folder, whatever state the run is in, and return its path.

    What is missing or broken in the folder is listed on the page. Raises `InputError` if the folder does not exist.
    """
    page = _page(read_run_folder(run_folder))
    path = run_folder / "report.html"
    unfinished = run_folder / "report.html.part"
    unfinished.write_bytes(page.encode("utf-8"))
    os.replace(unfinished, path)
    return path


def _page(run: RunFolder) -> str:
    title = escape(_model_name(run))
    sections = [
        _header(run),
        _notes(run),
        _figures("What the policy learned", learning_figures(run)),
        _figures("How the update behaved", update_figures(run)),
        _figures("Responses", response_figures(run)),
        _samples(run.completions),
        _cost(run),
        _folded(run),
    ]
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}: LongStraw run report</title>
<style>
{files("longstraw.report").joinpath("page.css").read_text(encoding="utf-8")}</style>
</head>
<body>
<main>
{"".join(sections)}
<footer class="quiet">Written by LongStraw from the files in the run folder.</footer>
</main>
</body>
</html>
"""


def _model_name(run: RunFolder) -> str:
    name = run.setting("model.name")
    return Path(name).name if isinstance(name, str) and Path(name).name else "A model without a name"


def _header(run: RunFolder) -> str:
    facts = " · ".join(escape(fact) for fact in _facts(run))
    tiles = "".join(_tiles(run))
    return f"""<header>
<p class="eyebrow">LongStraw run report · {escape(run.name)}</p>
<h1>{escape(_model_name(run))}</h1>
<p class="facts">{facts}</p>
<div class="tiles">{tiles}</div>
</header>
"""


def _facts(run: RunFolder) -> Iterable[str]:
    settings = (
        ("engine.prompt_gradient", "{} prompt gradient"),
        ("grpo.loss_type", "{} loss"),
        ("model.adapter.r", "LoRA r={}"),
        ("model.dtype", "{}"),
        ("model.quantization", "{}"),
        ("run.prompts_per_step", "{} prompts a step"),
        ("sampling.num_generations", "{} responses each"),
        ("engine.chunk_tokens", "chunks of {} tokens"),
    )
    for path, text in settings:
        value = run.setting(path)
        if isinstance(value, str | int | float):
            yield text.format(value)


def _tiles(run: RunFolder) -> Iterable[str]:
    table = run.metrics
    yield _change_tile("Reward", ", first and last step", table, "reward")
    for key in run.score_names:
        yield _change_tile(f"Held-out {key}", "", run.evaluations, key)
    num_idle = sum(value == 0.0 for _, value in table.finite("stepped"))
    idle = f", {num_idle} of them without an update" if num_idle else ""
    yield _tile(f"Optimizer steps{idle}", str(len(table.steps)))
    rows = {completion.row for completion in run.completions}
    if rows:
        yield _tile("Rows seen", f"{len(rows):,}")
    tokens = [value for _, value in table.finite("num_tokens")]
    if tokens:
        yield _tile("Tokens", count_text(max(tokens)))
    seconds = [value for _, value in table.finite("step_time")]
    if seconds:
        yield _tile("Time in steps", seconds_text(sum(seconds)))
    sizes = [value for _, value in table.finite("memory/peak_bytes")]
    if sizes:
        yield _tile("Peak memory", bytes_text(max(sizes)))


def _tile(name: str, value: str) -> str:
    return f'<div class="card tile"><b>{escape(value)}</b><span class="name">{escape(name)}</span></div>'


def _change_tile(name: str, what: str, table: StepTable, key: str) -> str:
    points = table.finite(key)
    if not points:
        return ""
    first, last = points[0][1], points[-1][1]
    if len(points) == 1:
        return _tile(f"{name}, step {points[0][0]} only", score_text(first))
    tone = ' class="up"' if last > first else ""
    change = f'{score_text(first)}<span class="arrow">→</span><span{tone}>{score_text(last)}</span>'
    return f'<div class="card tile"><b>{change}</b><span class="name">{escape(name + what)}</span></div>'


def _notes(run: RunFolder) -> str:
    if not run.notes:
        return ""
    items = "".join(f"<li>{escape(note)}</li>" for note in run.notes)
    return f'<div class="card notes"><h3>Not in this report</h3><ul>{items}</ul></div>\n'


def _figures(heading: str, figures: Sequence[Figure]) -> str:
    if not figures:
        return ""
    return f'<h2>{escape(heading)}</h2>\n<div class="figures">{"".join(map(_figure, figures))}</div>\n'


def _figure(figure: Figure) -> str:
    legend = "".join(f"<span>{_swatch(colour)}{escape(label)}</span>" for label, colour in figure.legend)
    legend = f'<div class="legend">{legend}</div>' if legend else ""
    return (
        f'<figure class="card"><figcaption><h3>{escape(figure.title)}</h3>'
        f'<p class="quiet">{escape(figure.explanation)}</p>{legend}</figcaption>{figure.svg}</figure>\n'
    )


def _swatch(colour: int) -> str:
    return f'<span class="swatch" style="background:var(--series-{colour})"></span>'


def _cost(run: RunFolder) -> str:
    uses = stage_uses(run)
    timed = [use for use in uses if math.isfinite(use.total_seconds)]
    sized = [use for use in uses if math.isfinite(use.peak_bytes)]
    time = time_figure(run)
    cards = [_figure(time)] if time else []
    if timed:
        seconds = [use.total_seconds for use in timed]
        texts = [f"{seconds_text(value)} · {value / max(sum(seconds), 1e-12):.0%}" for value in seconds]
        cards.append(
            _bars("Time by stage", "Over the whole run; shares are of all stages together.", timed, seconds, texts)
        )
    if sized:
        sizes = [use.peak_bytes for use in sized]
        explanation = "Most bytes alive at once during the stage, over all steps."
        cards.append(_bars("Memory by stage", explanation, sized, sizes, list(map(bytes_text, sizes))))
    return f'<h2>What it cost</h2>\n<div class="figures">{"".join(cards)}</div>\n' if cards else ""


def _bars(title: str, explanation: str, uses: Sequence[StageUse], values: Sequence[float], texts: Sequence[str]) -> str:
    longest = max(max(values), 1e-12)
    rows = "".join(
        f"<span>{escape(use.label)}</span>"
        f'<span class="track">'
        f'<i style="width:{100 * value / longest:.1f}%;background:var(--series-{use.colour})"></i></span>'
        f'<span class="value">{escape(text)}</span>'
        for use, value, text in zip(uses, values, texts, strict=True)
    )
    return (
        f'<div class="card"><h3>{escape(title)}</h3><p class="quiet">{escape(explanation)}</p>'
        f'<div class="bars">{rows}</div></div>\n'
    )


def _samples(completions: Sequence[Completion]) -> str:
    if not completions:
        return ""
    steps = [completion.step for completion in completions]
    columns = []
    for step in dict.fromkeys((min(steps), max(steps))):
        chosen = _spread([completion for completion in completions if completion.step == step])
        cards = "".join(map(_response, chosen))
        columns.append(f"<div><h3>Step {step}</h3>{cards}</div>")
    return (
        f"<h2>Responses, early and late</h2>\n"
        f'<p class="quiet">From the best to the worst reward of the step.</p>\n'
        f'<div class="columns">{"".join(columns)}</div>\n'
    )


def _spread(completions: Sequence[Completion]) -> list[Completion]:
    """A few completions evenly spread from the best reward to the worst, those without a reward last."""
    ordered = sorted(
        completions, key=lambda each: each.reward if math.isfinite(each.reward) else -math.inf, reverse=True
    )
    if len(ordered) <= NUM_SAMPLES:
        return ordered
    return [ordered[round(index * (len(ordered) - 1) / (NUM_SAMPLES - 1))] for index in range(NUM_SAMPLES)]


def _response(completion: Completion) -> str:
    badges = [f'<span class="badge reward">reward {score_text(completion.reward)}</span>']
    if math.isfinite(completion.advantage):
        badges.append(f'<span class="badge">advantage {completion.advantage:+.2f}</span>')
    if completion.row:
        badges.append(f'<span class="badge">row {escape(completion.row)}</span>')
    if completion.truncated:
        badges.append('<span class="badge">cut off</span>')
    prompt, text = completion.prompt_tail, completion.text
    if len(prompt) > NUM_PROMPT_CHARACTERS:
        prompt = "… " + prompt[-NUM_PROMPT_CHARACTERS:]
    if len(text) > NUM_RESPONSE_CHARACTERS:
        text = text[:NUM_RESPONSE_CHARACTERS] + " …"
    shown_prompt = f'<div class="prompt">{escape(prompt)}</div>' if prompt else ""
    shown_text = escape(text) if text.strip() else '<span class="quiet">(no text)</span>'
    return (
        f'<article class="card response"><div class="badges">{"".join(badges)}</div>'
        f'{shown_prompt}<div class="text">{shown_text}</div></article>\n'
    )


def _folded(run: RunFolder) -> str:
    parts = []
    if run.config_text.strip():
        parts.append(_details("Resolved configuration", f"<pre>{escape(run.config_text.strip())}</pre>"))
    if run.metrics.steps:
        parts.append(_details("Numbers by step", _table(run.metrics)))
    return f"<h2>Details</h2>\n{''.join(parts)}" if parts else ""


def _details(summary: str, content: str) -> str:
    return f'<details class="card"><summary>{escape(summary)}</summary>{content}</details>\n'


def _table(table: StepTable) -> str:
    shown = slice(-NUM_TABLE_STEPS, None)
    head = "".join(f"<th>{escape(key)}</th>" for key in ("step", *table.columns))
    rows = zip(table.steps[shown], *(values[shown] for values in table.columns.values()), strict=True)
    body = "".join("<tr>" + "".join(f"<td>{number_text(value)}</td>" for value in row) + "</tr>\n" for row in rows)
    more = f'<p class="quiet">The last {NUM_TABLE_STEPS} steps; all are in metrics.jsonl.</p>'
    return (more if len(table.steps) > NUM_TABLE_STEPS else "") + (
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )
