"""Score sampled responses to held-out rows. Nothing is trained on them and no training draw depends on them."""

from __future__ import annotations

from functools import partial

from longstraw.errors import LongStrawError
from longstraw.training.checkpoint import Position
from longstraw.training.metrics import Metrics, reward_metrics
from longstraw.training.prompts import completion_text, encode_prompt
from longstraw.training.rewards import Completions, ScoredGroup, TrainerState, score_group
from longstraw.training.run import Evaluation, Training, draw_seed, sampling_settings


def evaluate(training: Training, evaluation: Evaluation, position: Position) -> Metrics:
    """Means over all responses to all held-out rows, written to evaluations.jsonl under the functions' names.

    The same seeds every time: what changes between two evaluations is the policy.
    """
    ranks = training.ranks
    mine: list[tuple[ScoredGroup, list[int], list[bool]]] = []  # scores, lengths, and which were truncated
    with training.meter.measure(), ranks.together(LongStrawError):
        for row in ranks.share(evaluation.rows):
            seed = draw_seed(training.config.run.seed, "evaluation", row.index)
            settings = sampling_settings(training.config.sampling, training.stop_ids, seed)
            with training.engine.capture(encode_prompt(training.tokenizer, row)) as state:
                responses = training.engine.sample(state, evaluation.config.num_generations, settings)
            texts = [completion_text(training.tokenizer, response) for response in responses]
            completions = Completions(texts, [response.token_ids.tolist() for response in responses])
            trainer_state = TrainerState(position.step, training.max_steps, position.rows_drawn / len(training.rows))
            scored = ranks.once(partial(score_group, evaluation.metrics, row, completions, trainer_state))
            lengths = [len(response) for response in responses]
            mine.append((scored, lengths, [response.truncated for response in responses]))
    rows = ranks.gather_shares(mine)
    means = reward_metrics([scored for scored, _, _ in rows])
    all_lengths = [length for _, lengths, _ in rows for length in lengths]
    all_truncated = [is_truncated for _, _, truncated in rows for is_truncated in truncated]
    metrics: Metrics = {"step": position.step, "num_rows": len(evaluation.rows), "num_responses": len(all_lengths)}
    metrics |= {
        function.name: means[f"rewards/{function.name}/mean"]
        for function in evaluation.metrics
        if f"rewards/{function.name}/mean" in means
    }
    metrics |= {"completions/mean_length": sum(all_lengths) / len(all_lengths)}
    metrics |= {"completions/clipped_ratio": sum(all_truncated) / len(all_truncated)}
    training.folder.append("evaluations", metrics)
    names = [function.name for function in evaluation.metrics if function.name in metrics]
    summary = "  ".join(f"{name} {metrics[name]:.3f}" for name in names)
    training.say(f"held-out after step {position.step}: {summary}  ({len(all_lengths)} responses)")
    return metrics
