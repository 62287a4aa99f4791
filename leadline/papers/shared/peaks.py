"""The peak at cosine 1 in trained models: where it is, and the claims that follow from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from leadline.papers.shared.entry import Claim, above, reported
from leadline.report.layers import Distribution, LayerData
from leadline.report.presentation import spans

NEAR = 0.98  # cosines above it count as 1
SIDE = 0.90  # a peak at 1 is denser than the cosines between this and NEAR
LEAST = 0.01  # and holds at least this share of the pairs
STANDARD = "standard"
Models = Mapping[str, Sequence[LayerData]]  # by arm, the probe's layers of the trained model; none if it diverged


def near_one(distribution: Distribution) -> float:
    """Return the share of token pairs with a cosine above ``NEAR``."""
    return _share(distribution, NEAR, 1.0)


def beside_one(distribution: Distribution) -> float:
    """Return the share of token pairs with a cosine between ``SIDE`` and ``NEAR``."""
    return _share(distribution, SIDE, NEAR)


def _share(distribution: Distribution, low: float, high: float) -> float:
    edges = zip(distribution.edges, distribution.edges[1:], distribution.counts, strict=False)
    inside = sum(count for left, right, count in edges if left > low - 1e-6 and right < high + 1e-6)
    return inside / max(1, sum(distribution.counts))


def peaks_at_one(distribution: Distribution) -> bool:
    """Return whether at least ``LEAST`` of pairs lie above ``NEAR``, more densely than from ``SIDE`` to ``NEAR``."""
    top, side = near_one(distribution), beside_one(distribution)
    return top >= LEAST and top / (1 - NEAR) > side / (NEAR - SIDE)


def peak_layers(layers: Sequence[LayerData]) -> tuple[list[int], float]:
    """Return the layers whose outputs have a peak at cosine 1, and the largest share above ``NEAR`` in any layer."""
    known = [(layer.index, layer.cosines) for layer in layers if layer.index and layer.cosines is not None]
    shares = [near_one(cosines) for _, cosines in known]
    return [index for index, cosines in known if peaks_at_one(cosines)], max(shares, default=0.0)


def near_one_by_layer(layers: Sequence[LayerData]) -> tuple[list[int], list[float]]:
    """Return the layers with known cosines, without the embedding, and their shares above ``NEAR``."""
    known = [(layer.index, near_one(layer.cosines)) for layer in layers if layer.index and layer.cosines is not None]
    return [index for index, _ in known], [share for _, share in known]


def cosines_table(models: Models) -> list[dict[str, Any]]:
    """Return what the plots and sentences state of the token pairs, a row for each model and layer."""
    return [
        {"arm": arm, "layer": f.index, "similarity": f.similarity, "cosine": f.cosine,
         "cosine_median": f.cosines.median, "cosine_mode": f.cosines.mode, "near_one": near_one(f.cosines),
         "beside_one": beside_one(f.cosines)}
        for arm, layers in models.items() for f in layers if f.cosines is not None
    ]  # fmt: skip


def peak_claims(models: Models) -> list[Claim]:
    """Return the claims that the peak at cosine 1 appears with standard attention, and only there."""
    peaks = {name: peak_layers(layers) if layers else None for name, layers in models.items()}
    counts = {name: None if peak is None else float(len(peak[0])) for name, peak in peaks.items()}
    what = "layers with a peak at cosine 1,"
    claims = [above(f"{what} {STANDARD}", counts.pop(STANDARD), 0.0)]
    claims += [Claim(f"{what} {name}", "shape", count, 0.0, "none", count == 0) for name, count in counts.items()]
    share = f"largest share of pairs with cosine above {NEAR:g},"
    return claims + [reported(f"{share} {name}", None if peak is None else peak[1]) for name, peak in peaks.items()]


def peak_sentence(models: Models) -> str:
    """State whether the peak at cosine 1 appears with standard attention, and which other models remove it."""
    if not models[STANDARD]:
        return "Whether a peak at cosine 1 appears with standard attention is not known: its run diverged."
    peaks = {name: peak_layers(layers) for name, layers in models.items() if layers}
    others = [name for name in peaks if name != STANDARD]
    standard_layers, standard_share = peaks[STANDARD]

    def share(name: str) -> str:
        return f"{100 * peaks[name][1]:.3g} %"

    if not standard_layers:
        most = "; ".join([f"at most {share(STANDARD)} of them", *(f"{name} {share(name)}" for name in others)])
        line = (
            f"A peak at cosine 1 does not appear with {STANDARD} attention: in no layer do enough token pairs have a "
            f"cosine above {NEAR:g}, and more densely than just below it ({most})."
        )
        new = [name for name in others if peaks[name][0]]
        return line + (f" It appears with {_listed(new)}." if new else "")
    line = (
        f"The peak at cosine 1 appears with {STANDARD} attention in {_layers(standard_layers)} "
        f"of {len(models[STANDARD]) - 1}: up to {share(STANDARD)} of the token pairs have a cosine "
        f"above {NEAR:g}."
    )
    stays = [name for name in others if peaks[name][0]]
    fades = [name for name in others if not peaks[name][0] and peaks[name][1] > standard_share / 2]
    gone = [name for name in others if name not in stays and name not in fades]
    if gone:
        line += f" It is gone with {_listed([f'{name} (at most {share(name)})' for name in gone])}."
    if fades:
        line += (
            f" With {_listed([f'{name} (at most {share(name)})' for name in fades])} it no longer stands out in any "
            "layer, but there are nearly as many such pairs."
        )
    if stays:
        line += f" It stays with {_listed([f'{name} ({_layers(peaks[name][0])}, {share(name)})' for name in stays])}."
    return line


def _layers(numbers: Sequence[int]) -> str:
    return f"layer{'s' * (len(numbers) > 1)} {spans(numbers)}"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
