"""The figure of what a loss chooses under cuts: the same tokens with ours, others with verl's."""

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("verl")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "recipes"))


@pytest.fixture(scope="module")
def figure():
    import selection_figure

    return selection_figure


@pytest.fixture(scope="module")
def found(figure):
    return figure.choices(figure.mini_batch(24, longest=40))


def test_ours_chooses_the_same_tokens_under_every_cut(found):
    rows = {title: row for (title, name), row in found.items() if name == "trinity_loss"}
    assert len(rows) == 5
    for row in rows.values():
        whole = row["1 × 1"]
        assert len(row) == 9
        assert 0 < whole.tokens.sum() < len(whole.tokens) / 4
        for choice in row.values():
            assert torch.equal(choice.tokens, whole.tokens)
            assert choice.deviation(whole) < 1e-12


def test_verls_does_not(found):
    rows = {title: row for (title, name), row in found.items() if name == "verl"}
    assert len(rows) == 3
    for title, row in rows.items():
        whole, ours = row["1 × 1"], found[title, "trinity_loss"]["1 × 1"]
        assert whole.tokens.sum() == ours.tokens.sum()
        if "kl_cov" in title:  # Nothing is drawn.
            assert torch.equal(whole.tokens, ours.tokens)
        finest = row["8 × 2"]
        assert finest.common(whole) < 0.7
        assert finest.deviation(whole) > 1e-3


def test_what_is_read_off_the_gradient_is_what_was_attached(figure, found):
    batch = figure.mini_batch(24, longest=40)
    cut = figure.cuts(batch)["4 × 2"]
    for case in figure.CASES:
        loss = figure.EnginePolicyLoss(case.loss)
        (name,) = loss.over_mini_batch
        attached = figure.select(loss, batch, cut).token_fields[name] != 0
        attached = attached if case.loss.loss_mode != "m2po" else ~attached & (batch.response_mask != 0)
        assert torch.equal(attached, found[case.title, "trinity_loss"]["4 × 2"].tokens), case.title


def test_it_is_drawn_and_printed(figure, found, tmp_path):
    figure.draw(found, str(tmp_path / "selection.png"))
    assert (tmp_path / "selection.png").stat().st_size > 10_000
    assert figure.table(found).count("\n") == 9
