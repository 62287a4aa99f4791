"""Reports to draw, made by a small numpy network: real histograms and spectra without a probe."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from leadline.report import DepthReport, DepthUse, Distribution, Heatmap, LayerData, Massive, Removal, Trial, Verdict


def histogram(values: np.ndarray, low: float, high: float, bins: int = 80) -> Distribution:
    counts, edges = np.histogram(values, bins, (low, high))
    top = int(counts.argmax())
    return Distribution(
        edges.tolist(),
        counts.tolist(),
        float(values.mean()),
        float(np.median(values)),
        float((edges[top] + edges[top + 1]) / 2),
    )


def _similarity(X: np.ndarray) -> tuple[float, float]:
    diversity = float(((X - X.mean(0)) ** 2).sum() / (X**2).sum())
    return 1 - diversity, diversity


def _attention(X: np.ndarray, heads: int, sharpness: float, rng: np.random.Generator) -> np.ndarray:
    """(heads, n, n), rows sum to 1."""
    d = X.shape[1]
    q, k = (X @ (rng.normal(size=(heads, d, 8)) / math.sqrt(d)) for _ in range(2))
    scores = sharpness * q @ k.swapaxes(1, 2)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def layers(depth: int, heads: int, gain: float, sharpness: float = 0.3, tokens: int = 24, d: int = 48, seed: int = 0):
    """Metrics by layer, as a probe takes them, and heat maps of a network X <- norm(X + gain P X W)."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(tokens, d))
    data, maps = [], []
    previous, before = None, None
    for index in range(depth + 1):
        P = None
        if index:
            P = _attention(X, heads, sharpness, rng)
            mixed = sum(p @ X @ rng.normal(size=(d, d)) for p in P) / math.sqrt(d * heads)
            X = X + gain * mixed
            X = X / np.linalg.norm(X, axis=1, keepdims=True) * math.sqrt(d)
        similarity, diversity = _similarity(X)
        unit = X / np.linalg.norm(X, axis=1, keepdims=True)
        cosines = (unit @ unit.T)[np.triu_indices(tokens, 1)].clip(-1, 1)
        share = np.linalg.svd(X, compute_uv=False)
        share = share / share.sum()
        layer = LayerData(
            index=index,
            name=f"encoder.layer.{index - 1}" if index else "input",
            similarity=similarity,
            diversity=diversity,
            cosine=float(cosines.mean()),
            norm=math.sqrt(d) * (1 + 0.02 * index),
            effective_rank=float(np.exp(-(share * np.log(share + 1e-30)).sum())),
            similarity_patches=_similarity(X[1:])[0],
            cosines=histogram(cosines, -1, 1),
            tokens=tokens,
            similarity_robust=float(cosines.mean()),
            cosine_samples=float(cosines.mean()) / 2,
            similarity_normed=similarity,
        )
        if P is not None:
            entropy = -(P * np.log(P + 1e-30)).sum(-1)
            centred = P - P.mean(1, keepdims=True)
            layer.entropy = entropy.mean(1).tolist()
            layer.entropies = [histogram(row, 0, math.log(tokens)) for row in entropy]
            layer.delta = np.linalg.norm(centred, 2, axis=(1, 2)).tolist()
            layer.omega = (np.abs(centred).mean((1, 2)) * tokens).tolist()
            layer.second_eigenvalue = [float(np.sort(np.abs(np.linalg.eigvals(p)))[-2]) for p in P]
            layer.gradient_norm = float(3 * np.exp(rng.normal() / 5 - index / 40))
            layer.entropy_uniform = math.log(tokens)
            layer.gain, layer.change = gain, gain * 0.7
            layer.rate = before / diversity
            turn = np.sum(unit * previous, axis=1)
            layer.influence, layer.angle = float(1 - turn.mean()), float(np.arccos(turn.clip(-1, 1)).mean() / math.pi)
            layer.sink_weight = P.mean(1).max(1).tolist()
            layer.sink_share = float(np.mean(P.mean(1).max(1) > 0.3))
            layer.rates = {"attention": layer.rate * 1.05, "norm": 1.0, "mlp": 0.97}
            maps.append(Heatmap(index, 0, P[0].tolist()))
        previous, before = unit, diversity
        data.append(layer)
    return data, maps


def report(
    kind: str = "collapse", depth: int = 12, heads: int = 4, model: str = "bert <tiny> & co", **how: Any
) -> DepthReport:
    """A report of the given verdict, internally consistent."""
    gain = {"collapse": 1.0, "no collapse": 0.08, "entropy collapse": 0.3}[kind]
    data, maps = layers(depth, heads, gain, 40.0 if kind == "entropy collapse" else 0.3, **how)
    curve = [f.similarity for f in data]
    passes = {
        level: next((f.index for f in data if f.similarity > float(level)), None) for level in (".5", ".9", ".99")
    }
    trials, recommendation, use = [], None, None
    if kind == "collapse":
        for alpha in (0.5, 0.9):
            cured, _ = layers(depth, heads, gain * (1 - alpha), seed=1)
            trials.append(Trial(f"alpha {alpha}", {"alpha": alpha}, [f.similarity for f in cured], True))
        trials.append(Trial("alpha' .5", {"alpha_prime": 0.5}, [s * 0.999 for s in curve], False))
        trials.append(Trial("tau .3", {"de_escalation": 0.3}, [], False, "no place to put <it> in this model"))
        recommendation = {"alpha": 0.9}
    if kind == "entropy collapse":
        entropy = [float(np.mean(f.entropy)) for f in data if f.entropy]
        trials.append(Trial("alpha .5", {"alpha": 0.5}, curve, False, entropy=entropy))
        trials.append(Trial("alpha' .5", {"alpha_prime": 0.5}, curve, True, entropy=[e + 0.9 for e in entropy]))
        recommendation = {"alpha_prime": 0.5}
    words = {
        "collapse": f"Tokens become alike: similarity reaches {curve[-1]:.3f} after layer {depth}.",
        "no collapse": f"Leave it alone: nothing collapses here. Similarity is {curve[-1]:.3f} after the last layer.",
        "entropy collapse": "Attention looks at single tokens: its entropy is close to 0 in most heads.",
    }
    verdict = Verdict(
        kind=kind,
        text=words[kind],
        passes=passes,
        rate=(data[0].diversity / data[-1].diversity) ** (1 / depth),
        expected_rate=1 + gain**2,
        collapse_depth=float(passes[".99"] or 230) if kind == "collapse" else None,
        redundant=list(range(depth // 2, depth)) if kind == "collapse" else None,
        trials=trials,
        before=curve if trials else [],
        entropy_collapse=list(range(1, depth + 1)) if kind == "entropy collapse" else [],
        recommendation=recommendation,
    )
    if kind == "collapse":
        for layer in data[1:]:
            layer.massive_tokens = [Massive(0, 0.9, 40.0, 1.0)] if layer.index > 2 else []
            layer.massive_channels = [Massive(7, 0.1, 150.0, 0.5)]
            layer.removal, layer.removal_error = 2.0 / layer.index, 0.01
            layer.lens, layer.lens_agrees, layer.lens_first = float(depth - layer.index), 0.5, 1 / (depth + 1)
        use = DepthUse("loss", 0.05, depth - 2, [depth - 1, depth], [Removal([depth - 1, depth], 0.03, 0.01)])
        use.angles = [[abs(i - j) / (2 * depth + 2) for j in range(depth + 1)] for i in range(depth + 1)]
        use.tail, use.loss, use.rank_correlation, use.notes = Removal([depth], 0.01, None), 3.6, 0.7, ["A note <b>."]
        verdict.notes = ["Token 0 is massive in layer 3 & on."]
        for trial in trials:
            trial.change, trial.change_error, trial.unit = 0.4, 0.1, "loss"
            trial.robust = trial.similarity
    settings = {
        "samples": 8,
        "tokens": 24,
        "dtype": "float32",
        "device": "cpu",
        "versions": {"torch": "2.11", "x": None},
    }
    return DepthReport(model, settings, data, verdict, maps[:: max(1, depth // 4)], use)


def bare() -> DepthReport:
    """The smallest report that a probe can return, with NaN and infinity in it."""
    nan = math.nan
    data = [
        LayerData(0, "input", 0.1, 0.9, nan, 1.0, nan),
        LayerData(1, "block.<0>", nan, nan, nan, math.inf, 3.0, rate=math.inf, entropy=[nan, 0.5], omega=[nan, nan]),
        LayerData(2, "block.1", 1.0, 0.0, 1.0, 0.0, 1.0, cosines=Distribution([-1, 0, 1], [0, 0], nan, nan, nan)),
    ]
    verdict = Verdict("no collapse", "Nothing <b>odd</b>.", {".5": None}, None, nan, math.inf)
    return DepthReport("bare", {}, data, verdict)
