"""Shared memory and writes into it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.graph.constructs.catalogue import Construct, construct
from tests.graph.nets import Net, X


@construct
def chain_of_in_place_functions() -> Construct:
    """In-place functions are recorded like others, and the tensor passes through all of them."""

    def forward(_: Net, x: Tensor) -> Tensor:
        x = x.exp()
        x.add_(1)
        x *= 2
        torch.relu_(x)
        return x.cos()

    return Construct(
        Net(forward),
        (X,),
        """
        input
        exp <- input
        add <- exp
        mul <- add
        relu <- mul
        cos <- relu
        """,
    )


@construct
def two_names_of_one_tensor() -> Construct:
    """A write under one name of a tensor is read under the other."""

    def forward(_: Net, x: Tensor) -> Tensor:
        one = x.exp()
        other = one
        one.mul_(2)
        return other.cos()

    return Construct(
        Net(forward),
        (X,),
        """
        input
        exp <- input
        mul <- exp
        cos <- mul
        """,
    )


@construct
def view_of_a_view() -> Construct:
    """A write through a view of a view is the source of the base tensor and of the view in between."""

    def forward(_: Net, x: Tensor) -> Tensor:
        x = x.exp()
        rows = x.view(-1)
        rows[2:5].add_(1)
        return rows.cos().sum() + x.sum()

    return Construct(
        Net(forward),
        (X,),
        """
        input
        exp <- input
        view <- exp
        getitem <- view
        add <- getitem
        cos <- add
        sum <- cos
        sum#2 <- add
        add#2 <- sum, sum#2
        """,
    )


@construct
def view_taken_before_the_write() -> Construct:
    """A view created before a write takes its values from that write and keeps its shape."""

    def forward(_: Net, x: Tensor) -> Tensor:
        x = x.exp()
        left = x[:, :2]
        x.mul_(3)
        return left.sum() * left.t().sum()

    return Construct(
        Net(forward),
        (X,),
        """
        input
        exp <- input
        getitem <- exp
        mul <- exp
        sum <- mul
        t <- mul
        sum#2 <- t
        mul#2 <- sum, sum#2
        """,
    )


@construct
def write_into_a_part() -> Construct:
    """A write into a narrowed part of a tensor is a write into the tensor."""
    return Construct(
        Net(lambda _, x: (y := x.exp(), y.narrow(1, 0, 2).mul_(2), y + 1)[2]),
        (X,),
        """
        input
        exp <- input
        narrow <- exp
        mul <- narrow
        add <- mul
        """,
    )


@construct
def index_assignment() -> Construct:
    """A tensor that is filled in parts passes through each assignment and each in-place addition to a part of it."""

    def forward(_: Net, x: Tensor) -> Tensor:
        out = torch.zeros(2, 4)
        out[:, 0] = x[:, 1]
        out[0] += x[1]
        out[:, 1:3].copy_(x[:, 2:])
        return out * 2

    return Construct(
        Net(forward),
        (X,),
        # ``out[0] += …`` reads the row, adds to it, and assigns the row, which shares memory with ``out``, to ``out``.
        """
        input
        zeros
        getitem <- input
        setitem <- zeros, getitem
        getitem#2 <- setitem
        getitem#3 <- input
        add <- getitem#2, getitem#3
        setitem#2 <- add ×2
        getitem#4 <- setitem#2
        getitem#5 <- input
        copy <- getitem#4, getitem#5
        mul <- copy
        """,
    )


@construct
def assignment_by_mask() -> Construct:
    """A mask is an input of the function that uses it, as an index or as an argument."""

    def forward(_: Net, x: Tensor) -> Tensor:
        mask = x > 0
        x = x.clone()
        x[mask] = 0
        x.masked_fill_(~mask, 1.0)
        return x.index_add_(0, torch.tensor([0]), x[:1].exp())

    return Construct(
        Net(forward),
        (X,),
        """
        input
        gt <- input
        clone <- input
        setitem <- clone, gt
        invert <- gt
        masked_fill <- setitem, invert
        tensor
        getitem <- masked_fill
        exp <- getitem
        index_add <- masked_fill, tensor, exp
        """,
    )


@construct
def functions_with_several_results() -> Construct:
    """All results of a function come from one node, however they are unpacked."""

    def forward(_: Net, x: Tensor) -> Any:
        first, second = x.unbind(0)
        values, places = x.sort(1)
        best = x.max(1)
        return first * second, values.gather(1, places), best.values * best.indices

    return Construct(
        Net(forward),
        (X,),
        """
        input
        unbind <- input
        sort <- input
        max <- input
        mul <- unbind ×2
        gather <- sort ×2
        mul#2 <- max ×2
        """,
    )


@construct
def functions_that_do_nothing() -> Construct:
    """A call that returns its argument is not recorded; a copy or a view is."""

    def forward(_: Net, x: Tensor) -> Tensor:
        x = x.contiguous().to(torch.float32).requires_grad_(False)
        wide = x.expand(3, 2, 4).contiguous()
        return wide.contiguous().to(torch.float64).reshape(-1)

    return Construct(
        Net(forward),
        (X,),
        """
        input
        expand <- input
        contiguous <- expand
        to <- contiguous
        reshape <- to
        """,
    )


@construct
def write_into_a_detached_tensor() -> Construct:
    """A detached tensor shares its memory, so a write into it is the source of the original tensor as well."""
    return Construct(
        Net(lambda _, x: (y := x.exp(), y.detach().mul_(2), y.cos())[2]),
        (X,),
        """
        input
        exp <- input
        detach <- exp
        mul <- detach
        cos <- mul
        """,
    )


@construct
def straight_through() -> Construct:
    """Both branches of a straight-through estimator are recorded: the one with the gradient, and the detached one."""
    return Construct(
        Net(lambda _, x: x + (x.round() - x).detach()),
        (X,),
        """
        input
        round <- input
        sub <- round, input
        detach <- sub
        add <- input, detach
        """,
    )


@construct
def write_without_gradients() -> Construct:
    """A write without gradients is recorded."""

    def forward(_: Net, x: Tensor) -> Tensor:
        x = x.exp()
        with torch.no_grad():
            x.clamp_(max=1)
        return x.cos()

    return Construct(
        Net(forward),
        (X,),
        """
        input
        exp <- input
        clamp <- exp
        cos <- clamp
        """,
    )


@construct
def input_that_is_written_and_given_back() -> Construct:
    """An input that was written to is returned from the write, not from the input."""
    return Construct(
        Net(lambda _, x: x.add_(1)),
        (X.clone(),),
        """
        input
        add <- input
        output <- add
        """,
        outputs=True,
    )


@construct
def random_and_constant_tensors() -> Construct:
    """The source of a new tensor is the function that created it; one created like another takes that one."""

    def forward(_: Net, x: Tensor) -> Tensor:
        noise = torch.randn(4)
        return x + noise + torch.full_like(x, 2.0) + torch.tensor(1.0)

    return Construct(
        Net(forward),
        (X,),
        """
        input
        randn
        add <- input, randn
        full_like <- input
        add#2 <- add, full_like
        tensor
        add#3 <- add#2, tensor
        """,
    )


@construct
def value_that_becomes_a_number() -> Construct:
    """A Python number is not tracked, so the function that reads the value has no users."""
    return Construct(
        Net(lambda _, x: x * x.sum().item()),
        (X,),
        """
        input
        sum <- input
        mul <- input
        """,
    )
