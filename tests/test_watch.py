"""A watch where neither the situations nor the cases look: re-runs in a step, infinities of composite ops."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import nanhunt


class Absorbed(nn.Module):
    """Makes a NaN in its own code and throws it away, so that `auto` runs it once more on the spot."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * 0 / 0


class Twice(nn.Module):
    """One linear used before and after: autocast casts its weight once, and sums its gradient in float16."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.absorbed = nn.Linear(8, 8), Absorbed()

    def forward(self, x: Tensor) -> Tensor:
        first = self.shared(x)
        lost = self.absorbed(first.detach())
        return self.shared(torch.where(torch.isnan(lost).detach(), first, first * 2))


def _gradients(watched: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = Twice()
    x = torch.randn(64, 8) * 3
    with nanhunt.watch(model, on_hit="record", detail="auto" if watched else "module") as hunt:
        if not watched:
            hunt.remove()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(x).float().square().mean()
        loss.backward()
    assert not watched or [f.handled for f in hunt.findings] == ["absorbed"]
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_a_re_run_in_the_middle_of_a_step_leaves_the_cached_casts_alone() -> None:
    """Bitwise equal gradients, although a module in between was run a second time under autocast."""
    for plain, watched in zip(_gradients(False), _gradients(True), strict=True):
        assert torch.equal(plain, watched)


class LogDet(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.logdet(x.view(-1, 3, 3) * 0)


def test_an_infinity_that_torch_itself_writes_down_is_no_mask() -> None:
    """torch.logdet gives the -inf of a singular matrix by a `where`, as a user's mask would be made."""
    model = nn.Sequential(nn.Linear(9, 9), LogDet())
    with nanhunt.watch(model, detail="module", on_hit="record") as hunt:
        model(torch.randn(2, 9)).sum().backward()
    assert hunt.finding is not None
    assert (hunt.finding.phase, hunt.finding.module, hunt.finding.kind) == ("forward", "1", "-inf")
    assert hunt.finding.cause != "literal"
