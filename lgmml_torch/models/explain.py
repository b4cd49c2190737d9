"""Why one document stands above another: the score difference split over metrics, and theirs over features."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lgmml_torch.checks import DataError
from lgmml_torch.functional.distance import norm_factors
from lgmml_torch.functional.score import kernel
from lgmml_torch.models.local_metrics import MetricBlock
from lgmml_torch.models.preprocess.base import Source
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.ragged import RankingData
from lgmml_torch.segments import row_slices

PAIR_VALUES = 1 << 22  # of pairs, metrics and features held at a time
_FLAT = 1e-9  # below this relative difference of squared distances, the kernel's slope replaces its secant


@dataclass(frozen=True, eq=False)
class Explanation:
    """f(document) − f(over) = Σᵣ ``metrics[r]`` + ``base``, and ``metrics[r]`` = Σⱼ ``features[r, j]``; all in float64.

    Attributes:
        qid: the query.
        document: the document meant to be above, by id or by place in the list.
        over: the other one.
        scores: ``(2,)`` of the two.
        phi: ``(K,)`` weight of each metric for this query, times that of the whole where the model adds to trees.
        distances: ``(2, K)`` scaled distances of the two to each anchor.
        quality: ``(K,)`` NDCG of the anchor on its region, NaN where it was not measured.
        metrics: ``(K,)`` what each metric adds to the difference.
        features: ``(K, D')`` what each preprocessed feature adds to each metric's part.
        anchors: ``(K, D')`` the ideal documents, NaN for features a metric does not look at.
        columns: ``(D',)`` the raw feature and the view behind each preprocessed feature.
        values: ``(2, D')`` preprocessed features of the two.
        raw: ``(2, D)`` their raw features.
        base: what trees that the model adds to add to the difference; 0 without.
        feature_names: of the raw features, where they have names.
    """

    qid: Hashable
    document: str
    over: str
    scores: Tensor
    phi: Tensor
    distances: Tensor
    quality: Tensor
    metrics: Tensor
    features: Tensor
    anchors: Tensor
    columns: list[Source]
    values: Tensor
    raw: Tensor
    base: float = 0.0
    feature_names: tuple[str, ...] | None = None

    def called(self, column: int) -> str:
        """What a preprocessed feature is called: by the name of the raw one, where it has a name, and the view."""
        return self.columns[column].called(self.feature_names)

    @property
    def difference(self) -> float:
        """How much higher the document scores than the other; negative when it does not."""
        return float(self.scores[0] - self.scores[1])

    def leading_metrics(self, count: int = 10) -> list[int]:
        """The metrics that matter most, by size of their part; those without any are left out."""
        return largest_parts(self.metrics, count)

    def leading_features(self, count: int = 10, *, metric: int | None = None) -> list[tuple[int, float]]:
        """The preprocessed features that matter most, over all metrics or in one, with what they add."""
        parts = self.features.sum(0) if metric is None else self.features[metric]
        return [(column, float(parts[column])) for column in largest_parts(parts, count)]


@torch.no_grad()
def explain(
    model: LGMML,
    data: RankingData,
    *,
    qid: Hashable,
    document: str | int,
    over: str | int,
    policy: str | None = None,
    known_queries: bool = False,
) -> Explanation:
    r"""Split the difference of two documents' scores.

    .. math:: f(a) - f(b) = \sum_r \Phi[r]\,(\kappa(d_r(b)) - \kappa(d_r(a)))

    is exact. With v = x − p_r, d² is quadratic, so that d²(b) − d²(a) = Σⱼ (b − a)ⱼ·(M(v_a + v_b))ⱼ is exact
    too: it is the integral of the gradient along the line from a to b. Each metric's part is shared out in proportion,
    which makes the part of a feature in which the documents agree exactly 0. Trees that the model adds to are one part,
    which is not shared out.

    Args:
        model: what ranks.
        data: raw features, with the whole list of the query: weights and list features depend on it.
        qid: the query.
        document: an id in ``data.doc_ids``, or the document's place in its list in the caller's order, from 0.
        over: the one to compare with.
        policy: as in `LGMML.score`.
        known_queries: as in `LGMML.score`.

    Raises:
        DataError: when there is no such query or document.
    """
    data = model.encoded(data)
    part = data.select([_find_query(data, qid)])
    rows = [_find_document(part, document), _find_document(part, over)]
    prepared, phi, trees = _one_list(model, part, policy=policy, known_queries=known_queries)
    pair = prepared[rows]
    squares, shares, anchors = [], [], []
    for block in model.metrics.iter_blocks():
        square, share, support = _split_block(block, pair[None], model.metrics.norm, model.kernel)
        empty = pair.new_zeros(block.num_metrics, pair.shape[1])
        squares.append(square[:, 0])
        shares.append(empty.scatter_add(1, support, share[:, 0]))
        anchors.append((empty + torch.nan).scatter_(1, support, block.anchors.double().cpu()))
    # One document after the other: equal documents get equal scores, to the last bit.
    distances = [side.sqrt() for side in torch.cat(squares).unbind(1)]
    kappa = [kernel(side, model.kernel) for side in distances]
    own = torch.stack([(side * phi).sum() for side in kappa])
    return Explanation(
        qid=qid,
        document=document_label(part, rows[0]),
        over=document_label(part, rows[1]),
        scores=trees[rows] - own,
        phi=phi,
        distances=torch.stack(distances),
        quality=model.metrics.quality.double().cpu(),
        metrics=phi * (kappa[1] - kappa[0]),
        features=phi[:, None] * torch.cat(shares),
        anchors=torch.cat(anchors),
        columns=model.preprocess.sources(),
        values=pair,
        raw=part.features[rows],
        base=float(trees[rows[0]] - trees[rows[1]]),
        feature_names=model.feature_names,
    )


class _PairParts(NamedTuple):
    """Score differences of several pairs of documents of one list, split as in `Explanation`; all in float64."""

    metrics: Tensor  # (P, K) what each metric adds to the difference of each pair
    features: Tensor  # (P, D') what each preprocessed feature adds, over all metrics
    base: Tensor  # (P,) what trees that the model adds to add


@torch.no_grad()
def explain_pairs(
    model: LGMML,
    data: RankingData,
    pairs: Tensor,  # (P, 2) rows of `data`: a document, and the one it is compared with
    *,
    policy: str | None = None,
) -> _PairParts:
    """`explain` for many pairs of the documents of the only list of ``data``, without the parts of each metric."""
    prepared, phi, trees = _one_list(model, data, policy=policy)
    both = prepared[pairs]  # (P, 2, D')
    metrics, features = both.new_zeros(len(pairs), len(phi)), both.new_zeros(len(pairs), both.shape[2])
    for columns, block in model.metrics.iter_columns():
        for here in row_slices(len(pairs), block.factors[..., 0].numel(), PAIR_VALUES):
            _, shares, support = _split_block(block, both[here], model.metrics.norm, model.kernel)  # (K, P, s)
            shares = shares * phi[columns, None, None]
            metrics[here, columns] = shares.sum(2).T
            index = support.reshape(1, -1).expand(shares.shape[1], -1)
            features[here] = features[here].scatter_add(1, index, shares.transpose(0, 1).flatten(1))
    return _PairParts(metrics, features, trees[pairs[:, 0]] - trees[pairs[:, 1]])


def _one_list(
    model: LGMML, part: RankingData, *, policy: str | None, known_queries: bool = False
) -> tuple[Tensor, Tensor, Tensor]:  # (N, D'), (K,), (N,)
    """Of one list: its preprocessed features, the weights it gets, and what trees add to its scores."""
    device, dtype = model.device, model.dtype
    features, offsets = part.features.to(device=device, dtype=dtype), part.offsets.to(device)
    prepared = model.preprocess(features, offsets)
    known = None
    if known_queries:
        known = model.known_rows(part.qids).to(device)
    kappa = kernel(model.metrics(prepared), model.kernel)
    phi = model.weights(kappa, offsets, policy=policy, rows=known)[0].double().cpu()
    trees = phi.new_zeros(part.num_documents)
    if model.base is not None:
        phi = phi * model.base.own_weight
        trees = model.base.add_to(trees, part)
    return prepared.double().cpu(), phi, trees


def _find_query(data: RankingData, qid: Hashable) -> int:
    """The index of a query; text finds a number and the other way round, as command lines know only text."""
    for wanted in (qid, str(qid)):
        for index, known in enumerate(data.qids):
            if known == wanted or (isinstance(wanted, str) and str(known) == wanted):
                return index
    some = ", ".join(map(str, data.qids[:5]))
    if len(data.qids) > 5:
        some += ", …"
    raise DataError(f"there is no query {qid!r}; the data has {some}")


def _find_document(data: RankingData, name: str | int) -> int:
    """The row of a document of the only query: by its id, or by its place in the caller's order, from 0."""
    if isinstance(name, str):
        ids = list(data.doc_ids or ())
        count = ids.count(name)
        if count == 1:
            return ids.index(name)
        what = f"{count} documents" if count else "no document"
        raise DataError(f"query {data.qids[0]!r} has {what} with the id {name!r}")
    if not 0 <= name < data.num_documents:
        raise DataError(f"query {data.qids[0]!r} has {data.num_documents} documents, got place {name}, counted from 0")
    return int(data.order.argsort()[name])


def document_label(data: RankingData, row: int) -> str:
    """What a document is called: its id, or else its number in the caller's order, from 1."""
    if data.doc_ids is not None and data.doc_ids[row]:
        return data.doc_ids[row]
    return f"no. {int(data.order[row]) + 1}"


def _split_block(
    block: MetricBlock, pairs: Tensor, norm: str, name: str
) -> tuple[Tensor, Tensor, Tensor]:  # (P, 2, D') -> (K, P, 2), (K, P, s), (K, s)
    """Squared distances of the pairs, each feature's part of κ(d(b)) − κ(d(a)), and which features these are."""
    factors, points = norm_factors(block.factors.double().cpu(), norm), block.anchors.double().cpu()
    count, width = points.shape
    support = block.support.cpu()
    if block.is_full:
        support = torch.arange(width).expand(count, width)
    a = pairs[:, 0][:, support].transpose(0, 1)  # (K, P, s)
    b = pairs[:, 1][:, support].transpose(0, 1)
    image_a, image_b = (a - points[:, None]) @ factors, (b - points[:, None]) @ factors
    unit = block.scales.double().cpu().square()[:, None, None]
    squares = torch.stack([image_a.square().sum(2), image_b.square().sum(2)], dim=2) / unit
    rise = (b - a) * ((image_a + image_b) @ factors.mT) / unit  # sums to d²(b) − d²(a)
    return squares, _slope(squares, rise.sum(2), name) * rise, support


def _slope(squares: Tensor, rise: Tensor, name: str) -> Tensor:  # (K, P, 2), (K, P) -> (K, P, 1)
    """(κ(d_b) − κ(d_a))/(d_b² − d_a²), or the derivative of κ by d² where the two are too close for a quotient."""
    kappa = kernel(squares.sqrt(), name)
    flat = rise.abs() <= _FLAT * squares.sum(2)
    secant = (kappa[..., 1] - kappa[..., 0]) / torch.where(flat, 1.0, rise)
    with torch.enable_grad():
        middle = squares.mean(2).clamp_min(torch.finfo(squares.dtype).tiny).requires_grad_()
        (tangent,) = torch.autograd.grad(kernel(middle.sqrt(), name).sum(), middle)
    return torch.where(flat, tangent, secant)[..., None]


def largest_parts(parts: Tensor, count: int) -> list[int]:  # (P,)
    """The places of the largest values by size, largest first; those of zeros are left out.

    >>> largest_parts(torch.tensor([1.0, -3.0, 0.0]), 3)
    [1, 0]
    """
    order = parts.abs().argsort(descending=True, stable=True)[:count]
    places: list[int] = order[parts[order] != 0].tolist()
    return places
