import json
import math
import re
from html.parser import HTMLParser

import pytest

from longstraw.errors import InputError
from longstraw.report.html import NUM_TABLE_STEPS, write_report

VOID = {"meta", "br", "use"}


class Page(HTMLParser):
    """Collects text and attributes, and insists that every tag is closed by its own."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.links, self.scripts, self.texts = [], [], [], 0, []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)
        self.scripts += tag == "script"
        self.ids += [value for key, value in attrs if key == "id"]
        self.links += [value for key, value in attrs if key in {"src", "href", "xlink:href", "action", "data"}]

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())


def report(folder):
    path = write_report(folder)
    assert path == folder / "report.html"
    return Page(path.read_text(encoding="utf-8"))


def edit_lines(path, change):
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    path.write_text("".join(json.dumps(change(row)) + "\n" for row in rows), encoding="utf-8")


@pytest.mark.parametrize("num_steps", [0, 1, 14])
def test_report_is_one_whole_page_that_fetches_nothing(make_run, num_steps):
    folder = make_run(num_steps)
    page = report(folder)
    assert page.scripts == 0
    assert len(page.ids) == len(set(page.ids))
    assert all(link.startswith("#") and link[1:] in page.ids for link in page.links)
    source = (folder / "report.html").read_text(encoding="utf-8")
    outside_names = re.sub(r'xmlns(:\w+)?="[^"]*"', "", source)
    assert "http" not in outside_names
    assert "@import" not in source
    assert set(re.findall(r"url\(#([^)]*)\)", source)) <= set(page.ids)


def test_headline_gives_model_reward_and_scores_before_and_after(make_run):
    page = report(make_run(14))
    assert page.text.startswith("SmolLM2-135M-Instruct: LongStraw run report")
    assert "exact prompt gradient · dapo loss · LoRA r=16 · bfloat16 · 4 prompts a step · 8 responses each" in page.text
    assert "0.31 → 0.86 Held-out contains_code" in page.text
    assert "0.00 → 0.58 Held-out exact_code" in page.text
    assert re.search(r"0\.\d\d → 0\.\d\d Reward, first and last step", page.text)
    assert "14 Optimizer steps 56 Rows seen 728K Tokens" in page.text
    assert "611 MiB Peak memory" in page.text


def test_every_part_of_a_complete_run_is_there(make_run):
    page = report(make_run(14))
    parts = "Reward|Held-out scores|Reward by function|Loss|Entropy|KL to the reference policy|Clipped tokens"
    parts += "|Response length|Time of each step|Time by stage|Memory by stage|Step 1|Step 14|Resolved configuration"
    for part in parts.split("|"):
        assert part in page.texts, part
    assert "Not in this report" not in page.text
    assert "output_dir: runs/retrieval" in page.text


def test_run_without_a_step_says_so_and_keeps_what_it_has(make_run):
    page = report(make_run(0))
    assert "No optimizer step was recorded" in page.text
    assert "0.31 Held-out contains_code, step 0 only" in page.text
    assert "Resolved configuration" in page.text


def test_run_of_one_step_has_figures_and_no_change(make_run):
    page = report(make_run(1))
    assert "Reward, step 1 only" in page.text
    assert "Time of each step" in page.text
    assert page.texts.count("Step 1") == 1


def test_empty_folder_gets_a_report_that_names_what_is_missing(tmp_path):
    page = report(tmp_path)
    for name in ("config.yaml", "metrics.jsonl", "evaluations.jsonl", "completions.jsonl"):
        assert f"{name} is not in the run folder." in page.text
    assert "A model without a name" in page.text


def test_missing_folder_is_refused(tmp_path):
    with pytest.raises(InputError, match="nowhere is not a folder"):
        write_report(tmp_path / "nowhere")


def test_absent_metrics_are_named_and_leave_out_their_figures(make_run):
    folder = make_run(5)
    kept = ("step", "reward", "skipped_groups")
    edit_lines(folder / "metrics.jsonl", lambda row: {key: row[key] for key in kept})
    page = report(folder)
    assert "metrics.jsonl has no loss, grad_norm, step_time, completions/mean_length, memory/peak_bytes." in page.text
    assert "Loss" not in page.texts
    assert "What it cost" not in page.text
    assert "Reward" in page.texts


def test_numbers_that_are_not_finite_are_gaps_and_are_noted(make_run):
    folder = make_run(6)
    bad = {2: math.nan, 5: math.inf}
    edit_lines(folder / "metrics.jsonl", lambda row: row | {"loss": bad.get(row["step"], row["loss"]), "kl": None})
    page = report(folder)
    assert "metrics.jsonl: loss is not a finite number at step 2, 5; the curve has a gap there." in page.text
    assert "Loss" in page.texts
    assert "KL to the reference policy" not in page.texts
    assert "nan" not in (folder / "report.html").read_text(encoding="utf-8").lower().split()


def test_text_from_the_run_is_escaped_everywhere(make_run):
    folder = make_run(2)
    attack = "</style></pre></div><script>alert('x')</script> $a_b$ &amp; \ud800 \x00"
    edit_lines(
        folder / "completions.jsonl", lambda row: row | {"completion": attack, "prompt_tail": attack, "row": attack}
    )
    edit_lines(folder / "metrics.jsonl", lambda row: row | {f"rewards/{attack}/mean": 0.5, f"time/{attack}_seconds": 1})
    edit_lines(folder / "evaluations.jsonl", lambda row: row | {attack: 0.5})
    (folder / "config.yaml").write_text(f"model:\n  name: {attack[:-4]!r}\n", encoding="utf-8")
    page = report(folder)
    assert page.scripts == 0
    assert page.text.count("<script>alert('x')</script> $a_b$ &amp;") > 8


def test_samples_run_from_best_to_worst_reward_and_are_cut(make_run):
    folder = make_run(3)
    rewards = iter(range(1000))
    edit_lines(folder / "completions.jsonl", lambda row: row | {"reward": next(rewards), "completion": "long " * 5000})
    page = report(folder)
    shown = [float(text.removeprefix("reward ")) for text in page.texts if text.startswith("reward ")]
    assert shown == [31, 21, 10, 0, 95, 85, 74, 64]
    assert (folder / "report.html").stat().st_size < 300_000


def test_long_run_shows_its_last_steps_as_numbers(make_run):
    folder = make_run(NUM_TABLE_STEPS + 30)
    page = report(folder)
    assert f"The last {NUM_TABLE_STEPS} steps; all are in metrics.jsonl." in page.text
    first_cells = re.findall(r"<tr><td>(\d+)</td>", (folder / "report.html").read_text(encoding="utf-8"))
    assert list(map(int, first_cells)) == list(range(31, NUM_TABLE_STEPS + 31))
    assert (folder / "report.html").stat().st_size < 1_000_000


def test_same_run_gives_the_same_bytes(make_run):
    folder = make_run(4)
    first = write_report(folder).read_bytes()
    assert write_report(folder).read_bytes() == first
    assert [path.name for path in folder.glob("report*")] == ["report.html"]
