"""The picture of the method shows what it says."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from research.gallery import DOCS
from research.method_picture import PHI, RULER, build_scene, picture
from research.plots import Figure


def test_the_metric_and_the_ruler_disagree() -> None:
    scene = build_scene()
    anchor = scene.block.anchors[scene.rows[0]]
    torch.testing.assert_close((scene.points[:2] - anchor).norm(dim=1), torch.full((2,), RULER))
    near, far = scene.dists[:2, 0].tolist()
    assert 2 * near < far
    taken_off = (scene.kappa * PHI).sum(1)
    assert taken_off.argsort().tolist() == [0, 1, 2]  # A, B, C, as drawn and told
    torch.testing.assert_close(scene.kappa, scene.dists * (-scene.dists).exp())


def test_it_is_drawn() -> None:
    figure = picture()
    assert isinstance(figure, Figure)
    assert [axis.get_title("left")[0] for axis in figure.axes] == ["1", "2", "3"]


def test_the_gallery_draws_every_picture_it_shows() -> None:
    text = (DOCS / "gallery.md").read_text(encoding="utf-8")
    drawn = set(re.findall(r'save_figure\(.*"(\w+\.png)"\)', text))
    shown = set(re.findall(r"\]\(images/gallery/(\w+\.png)\)", text))
    assert drawn == shown == {file.name for file in Path(DOCS, "images", "gallery").iterdir()}
