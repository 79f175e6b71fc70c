"""What a cell of the benchmark will take, from the cells already measured: long ones are estimated instead of run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Estimate:
    value: float
    basis: str


@dataclass(frozen=True)
class Size:
    num_prompt_tokens: int
    num_responses: int
    num_response_tokens: int  # of one response


def estimate_seconds(measured: dict[Size, float], size: Size, *, shares_prompt: bool) -> Estimate | None:
    """Time of `size`, None without a basis.

    At the same prompt length time grows in proportion to G when every response repeats the prompt, otherwise at most as
    the square of the group's tokens. At the same G it is linear plus quadratic in the prompt, fitted to the two longest
    prompts measured, or quadratic (too high) if there is only one.
    """
    if size in measured:
        return Estimate(measured[size], "measured")
    smaller_groups = [s for s in measured if s.num_prompt_tokens == size.num_prompt_tokens and _fewer(s, size)]
    if smaller_groups:
        nearest = max(smaller_groups, key=lambda s: s.num_responses)
        growth = size.num_responses / nearest.num_responses
        if shares_prompt:
            growth = (_num_tokens(size) / _num_tokens(nearest)) ** 2
        return Estimate(measured[nearest] * growth, f"{growth:.2g} x the time at G={nearest.num_responses}")
    shorter = sorted(
        (s for s in measured if s.num_responses == size.num_responses and s.num_prompt_tokens < size.num_prompt_tokens),
        key=lambda s: s.num_prompt_tokens,
    )
    if shorter:
        return _estimate_from_shorter(measured, shorter, size)
    if size.num_responses > 1:
        single = Size(size.num_prompt_tokens, 1, size.num_response_tokens)
        estimate = estimate_seconds(measured, single, shares_prompt=shares_prompt)
        if estimate is not None:
            growth = (_num_tokens(size) / _num_tokens(single)) ** 2 if shares_prompt else size.num_responses
            return Estimate(estimate.value * growth, f"{growth:.2g} x G=1, itself estimated: {estimate.basis}")
    return None


def estimate_bytes(measured: dict[Size, int], size: Size) -> Estimate | None:
    """Peak bytes of `size`, in proportion to the group's tokens, None without a basis."""
    if not measured:
        return None
    nearest = max(measured, key=_num_tokens)
    growth = _num_tokens(size) / _num_tokens(nearest)
    where = f"{nearest.num_prompt_tokens:,} prompt tokens, G={nearest.num_responses}"
    return Estimate(measured[nearest] * growth, f"{growth:.2g} x the peak at {where}")


def _estimate_from_shorter(measured: dict[Size, float], shorter: list[Size], size: Size) -> Estimate:
    tokens, last = size.num_prompt_tokens, shorter[-1]
    if len(shorter) == 1:
        growth = (tokens / last.num_prompt_tokens) ** 2
        return Estimate(measured[last] * growth, f"quadratic from {last.num_prompt_tokens:,} tokens, an upper bound")
    first = shorter[-2]
    small, large = first.num_prompt_tokens, last.num_prompt_tokens
    quadratic = (measured[last] / large - measured[first] / small) / (large - small)
    quadratic = min(max(quadratic, 0.0), measured[last] / large**2)
    linear = measured[last] / large - quadratic * large
    basis = f"linear plus quadratic through {small:,} and {large:,} tokens"
    return Estimate(linear * tokens + quadratic * tokens**2, basis)


def _fewer(size: Size, than: Size) -> bool:
    return size.num_responses < than.num_responses


def _num_tokens(size: Size) -> int:
    return size.num_prompt_tokens + size.num_responses * size.num_response_tokens
