"""Policy losses as loops over tokens in Python floats, written from the papers' formulas.

Each takes (algorithm config, tokens, frozen tokens) and returns one loss per token; `frozen` holds the values that the
formula sees without gradient, so that finite differences of the loop give what autograd must give.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from algorithm_batches import Token

from slime_rl.config import AlgorithmConfig

Slow = Callable[[AlgorithmConfig, list[Token], list[Token]], list[float]]


def bounds(a: AlgorithmConfig) -> tuple[float, float]:
    return 1 - a.eps_clip, 1 + (a.eps_clip_high if a.eps_clip_high is not None else a.eps_clip)


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def ratio(t: Token) -> float:
    return math.exp(clip(t.theta - t.old, -20, 20))


def surrogate(a: AlgorithmConfig, r: float, advantage: float) -> float:
    objective = min(r * advantage, clip(r, *bounds(a)) * advantage)
    if a.eps_clip_c is not None and advantage < 0:
        objective = max(objective, a.eps_clip_c * advantage)
    return -objective


def mean_by_sample(tokens: list[Token], values: list[float]) -> list[float]:
    sums: dict[int, list[float]] = {}
    for t, v in zip(tokens, values, strict=True):
        sums.setdefault(t.sample, []).append(v)
    return [sum(sums[t.sample]) / len(sums[t.sample]) for t in tokens]


def ppo_clip(a: AlgorithmConfig, tokens: list[Token], frozen: list[Token]) -> list[float]:
    return [surrogate(a, ratio(t), t.advantage) for t in tokens]


def gspo(a: AlgorithmConfig, tokens: list[Token], frozen: list[Token]) -> list[float]:
    means = mean_by_sample(frozen, [f.theta - f.old for f in frozen])
    return [
        surrogate(a, math.exp(m) * math.exp(t.theta - f.theta), t.advantage)
        for t, f, m in zip(tokens, frozen, means, strict=True)
    ]


def geo_mean(a: AlgorithmConfig, tokens: list[Token], frozen: list[Token]) -> list[float]:
    advantages = mean_by_sample(tokens, [t.advantage for t in tokens])
    low, high = bounds(a)
    chosen = []
    for t, advantage in zip(tokens, advantages, strict=True):
        log_ratio = t.theta - t.old
        clipped = clip(log_ratio, low - 1, high - 1)
        chosen.append(min(log_ratio, clipped) if advantage > 0 else max(log_ratio, clipped))
    means = mean_by_sample(tokens, chosen)
    return [-advantage * math.exp(m) for advantage, m in zip(advantages, means, strict=True)]


def cispo(a: AlgorithmConfig, tokens: list[Token], frozen: list[Token]) -> list[float]:
    return [-clip(ratio(f), *bounds(a)) * t.advantage * t.theta for t, f in zip(tokens, frozen, strict=True)]


def sapo(a: AlgorithmConfig, tokens: list[Token], frozen: list[Token]) -> list[float]:
    out = []
    for t in tokens:
        tau = a.sapo_tau_pos if t.advantage > 0 else a.sapo_tau_neg
        out.append(-4 / tau / (1 + math.exp(-tau * (ratio(t) - 1))) * t.advantage)
    return out


def gpg(a: AlgorithmConfig, tokens: list[Token], frozen: list[Token]) -> list[float]:
    return [-t.advantage * t.theta for t in tokens]


def sft(a: AlgorithmConfig, tokens: list[Token], frozen: list[Token]) -> list[float]:
    return [-t.theta for t in tokens]


def distillation(a: AlgorithmConfig, tokens: list[Token], frozen: list[Token]) -> list[float]:
    return [surrogate(a, ratio(t), t.teacher - t.old + a.distillation_reward_coef * t.advantage) for t in tokens]


def clip_cov(a: AlgorithmConfig, tokens: list[Token], frozen: list[Token]) -> list[float]:
    return [0.0 if t.selected else surrogate(a, ratio(t), t.advantage) for t in tokens]


def kl_cov(a: AlgorithmConfig, tokens: list[Token], frozen: list[Token]) -> list[float]:
    return [-ratio(t) * t.advantage + (a.kl_cov_coef * abs(t.theta - t.old) if t.selected else 0.0) for t in tokens]


def decoupled_ppo(a: AlgorithmConfig, tokens: list[Token], frozen: list[Token]) -> list[float]:
    out = []
    for t, f in zip(tokens, frozen, strict=True):
        proximal = t.old
        if a.proximal_policy == "interpolate":  # the step turns version 7 into version 8
            alpha = (7 - t.version) / (8 - t.version)
            proximal = t.rollout + alpha * (f.theta - t.rollout)
        weight = math.exp(proximal - t.rollout)
        if a.behave_weight_cap is not None:
            weight = min(weight, a.behave_weight_cap)
        out.append(weight * surrogate(a, math.exp(t.theta - proximal), t.advantage))
    return out
