"""A small data set and models for it, made without training; shared by the tests of the command line and its parts."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import torch

from lgmml_torch.data.write import save_letor
from lgmml_torch.models.local_metrics import LocalMetrics, MetricBlock
from lgmml_torch.models.phi import Phi
from lgmml_torch.models.preprocess.base import Preprocess
from lgmml_torch.models.preprocess.compose import Chain, list_rank_features
from lgmml_torch.models.preprocess.steps import Standardize
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.ragged import RankingData

FEATURES = 5


def small_data(queries: int = 12, seed: int = 0, *, shuffled: bool = False, ids: bool = True) -> RankingData:
    """Lists of 1 to 9 documents; the last feature is constant; query ids do not start at 0."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 10, (queries,), generator=generator)
    qid = torch.arange(10, 10 + queries).repeat_interleave(sizes)
    features = torch.randn(len(qid), FEATURES, generator=generator).round(decimals=3)
    features[:, -1] = 2.0
    labels = (features[:, 0] + 0.5 * torch.randn(len(qid), generator=generator)).clamp(0, 2).round()
    rows = torch.randperm(len(qid), generator=generator) if shuffled else torch.arange(len(qid))
    names = [f"D{row:03d}" for row in rows.tolist()]
    return RankingData.from_arrays(features[rows], labels[rows], qid=qid[rows], doc_ids=names if ids else None)


def save_lightgbm(data: RankingData, path: Path) -> None:
    """Lines without ``qid:`` and zeros, and the sizes of the queries beside them, as LightGBM reads them."""
    sizes = torch.unique_consecutive(data.in_caller_order(data.query_index), return_counts=True)[1].tolist()
    assert len(sizes) == data.num_queries
    save_letor(data.replace(qids=tuple(range(len(sizes)))), path, sparse=True)
    name = str(path).removesuffix(".gz")
    packed = name != str(path)
    text = gzip.decompress(path.read_bytes()) if packed else path.read_bytes()
    lines = re.sub(rb" qid:\d+", b"", text)
    path.write_bytes(gzip.compress(lines) if packed else lines)
    Path(f"{name}.query").write_text("".join(f"{size}\n" for size in sizes))


def small_model(
    *,
    mode: str = "shared",
    norm: str = "mahalanobis",
    kernel: str = "paper",
    preprocess: Preprocess | None = None,
    data: RankingData | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 1,
) -> LGMML:
    """Random metrics, in all features and in two, with random weights."""
    data = small_data() if data is None else data
    generator = torch.Generator().manual_seed(seed)
    chain = preprocess if preprocess is not None else list_rank_features()
    prepared = chain.fit_transform(data.features, data.offsets)
    width = prepared.shape[1]

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    support = torch.stack([torch.randperm(width, generator=generator)[:2] for _ in range(4)])
    blocks = [
        MetricBlock(draw(4, 2), draw(4, 2, 2), support=support, scales=draw(4).abs() + 0.5),
        MetricBlock(draw(3, width), draw(3, width, 2), quality=torch.rand(3, generator=generator)),
    ]
    metrics = LocalMetrics(blocks, num_features=width, norm=norm)
    phi = Phi(data.num_queries, 7, mode=mode)
    with torch.no_grad():
        phi.table.weight.copy_(torch.rand(phi.table.weight.shape, generator=generator))
        phi.table.weight[:, 0] = 0.0
    model = LGMML(chain, metrics, phi, kernel=kernel, qids=data.qids).to(dtype)
    model.summarize(model.distances(data.features.to(dtype), data.offsets), data.offsets)
    return model.eval()


def plain_chain() -> Preprocess:
    return Chain([Standardize()])
